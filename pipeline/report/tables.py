"""The parts of a report, and their output on a terminal; `pages.py` shows the same as HTML."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import click

from soa.text import microseconds as microseconds
from soa.text import plain

Cell = str | tuple[str, ...]
"""A text of one line, or of several lines."""
_PIPE = 100  # the width of the output, in characters, if stdout is no terminal
_PROSE = 14  # the least width of a column of sentences, in characters
_GAP = "  "  # between two columns
# A cell that counts as a number: one with a sign, a unit of up to two letters, or a word instead.
_NUMBER = re.compile(r"[-+<>=~≤≥]*[0-9][0-9.,/…e%+-]*( \S{1,2})?|nan|-?inf|—|exact|none|")
# A cell that is a date with its time, or empty.
_MOMENT = re.compile(r"[0-9-]{10} [0-9:]{5,8}|")


@dataclass(frozen=True)
class Table:
    """A table of a report. The first column names the row.

    Cells are plain text, also from other users: markup in them has no effect.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[tuple[str, ...], ...]] = field(default_factory=list)
    """Each cell is a tuple of its lines."""
    links: dict[str, str] = field(default_factory=dict)
    """Addresses of links on a page, by the text of the cell that becomes the link."""

    def add_row(self, *cells: Cell) -> None:
        """Add a row at the end. Control characters in its texts are made visible."""
        lines = (tuple(map(plain, (cell,) if isinstance(cell, str) else cell)) for cell in cells)
        self.rows.append(tuple(lines))

    def without_empty_columns(self) -> Table:
        """Return a copy without the columns whose cells are all empty. The first column stays."""
        kept = [
            i for i in range(len(self.columns))
            if i == 0 or any(any(row[i]) for row in self.rows if i < len(row))
        ]  # fmt: skip
        rows = [tuple(row[i] for i in kept if i < len(row)) for row in self.rows]
        return Table(self.title, tuple(self.columns[i] for i in kept), rows, self.links)

    def numeric_columns(self) -> list[bool]:
        """Say for each column whether it holds only numbers, which are aligned to the right.

        The first column never counts as numbers, since it names the row.
        """
        return [i > 0 and self._all_match(i, _NUMBER) for i in range(len(self.columns))]

    def is_prose(self, column: int) -> bool:
        """Return whether a column holds sentences, which may be broken into lines."""
        return column > 0 and not any(self._all_match(column, form) for form in (_NUMBER, _MOMENT))

    def _all_match(self, column: int, form: re.Pattern[str]) -> bool:
        """Return whether every line of a column matches `form`. A missing cell matches, too."""
        cells = (row[column] for row in self.rows if column < len(row))
        return all(form.fullmatch(line) for cell in cells for line in cell)


Part = str | Table
"""A part of a report: a line, or a table."""


def new_table(title: str, *columns: str, rows: Iterable[Iterable[Cell]] = ()) -> Table:
    """Make a table of texts that may be from other users: control characters are made visible.

    Only the title may have line breaks.
    """
    table = Table(plain(title, "\n"), tuple(map(plain, columns)))
    for row in rows:
        table.add_row(*row)
    return table


def show(parts: Iterable[Part], width: int | None = None) -> None:
    """Print a report on stdout, with tables of at most `width` characters (None: the terminal)."""
    for i, part in enumerate(parts):
        if isinstance(part, str):
            write(part)
            continue
        if i and part.title:
            _echo("")
        for line in table_lines(part, width or terminal_width()):
            _echo(line)


def write(text: object, err: bool = False) -> None:
    """Print a line, on stderr if `err`. On a terminal, a long one is wrapped between words."""
    line, stream = plain(text), sys.stderr if err else sys.stdout
    for piece in wrap_line(line, terminal_width()) if stream.isatty() else [line]:
        _echo(piece, err)


def _echo(line: str, err: bool = False) -> None:
    """Print a line as it is, but with escapes for characters that the stream cannot encode."""
    stream = sys.stderr if err else sys.stdout
    encoding = stream.encoding or "utf-8"
    line = line.encode(encoding, "backslashreplace").decode(encoding)  # a locale without UTF-8
    # `file`: rich replaces the stream during a live display; click alone would bypass that.
    click.echo(line, file=stream)


def terminal_width() -> int:
    """Return the width of the terminal, or $COLUMNS, in characters; 100 if there is neither."""
    return shutil.get_terminal_size((_PIPE, 24)).columns


def wrap_line(line: str, width: int) -> list[str]:
    """Break a line at spaces into lines of at most `width` characters. A longer word is kept whole.

    If two or more spaces follow the first word, as in `name  value`, all further lines begin below
    the text that follows them. Otherwise these lines are indented like the first one, or by 2.
    """
    lead = re.match(r" *(\S+ {2,})?", line)
    indent = min(lead.end() if lead else 0, width // 2)
    return _wrap_text(line, width, " " * (indent or 2))


def _wrap_text(text: str, width: int, indent: str = "") -> list[str]:
    """Break a text into lines of at most `width` characters; all but the first begin with `indent`.

    A text without words gives one empty line.
    """
    return textwrap.wrap(
        text, max(width, 1), subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False, drop_whitespace=True, replace_whitespace=False,
    ) or [""]  # fmt: skip


def table_lines(table: Table, width: int) -> Iterator[str]:
    """Yield the lines of a table, of at most `width` characters.

    Sentences are broken into several lines; numbers and names are not. If the table is still too
    wide, each cell gets a line of its own.
    """
    if table.title:
        yield from _wrap_text(table.title, width)
    table = table.without_empty_columns()
    widths = _column_widths(table, width)
    are_facts = len(table.columns) == 2 and not any(table.columns)  # names and values
    if widths is None and are_facts:
        names = max((text_width(line) for row in table.rows for line in row[0]), default=0)
        widths = [names, max(width - names - len(_GAP), 1)]
    if widths is None:
        yield from _paragraph_lines(table, width)
        return
    right = table.numeric_columns()
    heads = tuple(
        tuple(_wrap_text(name, room)) for name, room in zip(table.columns, widths, strict=True)
    )
    if any(table.columns):
        yield from _row_lines(heads, widths, right)
        yield _GAP.join("─" * room for room in widths)
    for row in table.rows:
        yield from _row_lines(row, widths, right)


def _row_lines(
    cells: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool]
) -> Iterator[str]:
    """Yield the lines of a row, whose cells are wrapped to the `widths` of their columns.

    `right`: for each column, whether its cells are aligned to the right.
    """
    broken = [
        [piece for line in cell for piece in (_wrap_text(line, room) if line else [""])]
        for cell, room in zip(cells, widths, strict=False)
    ]
    for lines in zip_longest(*broken, fillvalue=""):
        padded = [
            line.rjust(room - text_width(line) + len(line)) if to_right
            else line.ljust(room - text_width(line) + len(line))
            for line, room, to_right in zip(lines, widths, right, strict=False)
        ]  # fmt: skip
        yield _GAP.join(padded).rstrip()


def text_width(text: str) -> int:
    """Return the width of a text on a terminal, where some characters take two places or none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _column_widths(table: Table, width: int) -> list[int] | None:
    """Return the width of each column, or None if the table does not fit into `width`.

    A column is at least as wide as its longest word, or as its longest line if it is no prose. The
    room that is left goes, one character after another, to the column that lacks most.
    """
    room = width - len(_GAP) * (len(table.columns) - 1)
    full_widths, widths = [], []
    for i, name in enumerate(table.columns):
        lines = [line for row in table.rows if i < len(row) for line in row[i]]
        longest = max(map(text_width, lines), default=0)
        heading = max(map(text_width, name.split()), default=0)
        words = max((text_width(word) for line in lines for word in line.split()), default=0)
        unbroken = max(words, min(longest, _PROSE)) if table.is_prose(i) else longest
        full_widths.append(max(longest, text_width(name)))
        widths.append(max(unbroken, heading))
    if sum(widths) > room:
        return None
    while sum(widths) < min(room, sum(full_widths)):
        lacks_most = max(range(len(widths)), key=lambda i: full_widths[i] - widths[i])
        widths[lacks_most] += 1
    return widths


def _paragraph_lines(table: Table, width: int) -> Iterator[str]:
    """Yield the lines of a table that is too wide for the terminal: a paragraph for each row.

    A paragraph begins with the row's name; below it, each filled cell follows its column's name.
    """
    longest = max((text_width(name) for name in table.columns[1:]), default=0)
    for row in table.rows:
        yield from _wrap_text(" ".join(row[0]) or "—", width)
        for name, cell in zip(table.columns[1:], row[1:], strict=False):
            if any(cell):
                lead = f"  {name}{' ' * (longest - text_width(name))}  " if longest else "  "
                text = _GAP.join(line for line in cell if line)
                yield from _wrap_text(lead + text, width, " " * min(len(lead), width // 2))
