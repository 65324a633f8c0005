"""Escape text from outside before it is printed; numbers, units and names as text.

A reason, a description, a name in a bundle, or a message of another library may hold escape
sequences of a terminal, characters that reverse the direction of writing, HTML or Markdown. All
output is printed through a function that escapes, so that no part acts as a command or as markup.
"""

from __future__ import annotations

import logging
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping

# The characters that are markup in CommonMark with GitHub's tables.
_MARKDOWN = re.compile(
    r"[\\`*\[\]|~]|<(?=[A-Za-z/!?])|&(?=[#A-Za-z])|(?<![^\W_])_|_(?![^\W_])|^[-+=>#]"
    r"|(?<=^\d)[.)](?=\s|$)"
)


def plain(text: object, newline: str = r"\n") -> str:
    """Return text on one line, with invisible characters and terminal commands escaped: `\\x1b`.

    `newline` replaces each line break; "\\n" keeps the lines.
    """
    lines = str(text).replace("\r\n", "\n").split("\n")
    return newline.join("".join(map(_visible, line)) for line in lines)


def _visible(character: str) -> str:
    """Return a character as it is if it is a space or can be seen; otherwise escape it.

    Escaped are control characters (C0, C1), direction marks, surrogates, unassigned characters and
    line separators.
    """
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()


def in_html(text: object) -> str:
    """Escape text that stands between tags of HTML or SVG."""
    import html  # slow to import: it holds a table of all entity names

    return html.escape(plain(text, "\n"))


def html_table(title: object, head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a small HTML table for a notebook, with a title; all text is escaped."""

    def row(cells: Iterable[object], tag: str) -> str:
        return "".join(["<tr>", *(f"<{tag}>{in_html(cell)}</{tag}>" for cell in cells), "</tr>"])

    body = "".join(row(cells, "td") for cells in rows)
    return f"<p>{in_html(title)}</p><table>{row(head, 'th')}{body}</table>"


def in_markdown(text: object) -> str:
    """Escape text for one line of Markdown; this also fits a table's cell."""
    return _MARKDOWN.sub(r"\\\g<0>", plain(text, " ").strip())


def logger(name: str) -> logging.Logger:
    """Return the logger of this name, which then escapes its arguments by `plain`."""
    log = logging.getLogger(name)
    log.addFilter(_plain_arguments)
    return log


def _plain_arguments(record: logging.LogRecord) -> bool:
    """Escape the arguments of a log record. Returns True, so that the filter keeps every record."""
    if isinstance(record.args, Mapping):  # of "%(name)s"
        record.args = {key: _plain_argument(value) for key, value in record.args.items()}
    elif record.args:
        record.args = tuple(map(_plain_argument, record.args))
    return True


def _plain_argument(value: object) -> object:
    """Return a log argument as plain text; a number stays one, for formats such as `%d`."""
    return value if isinstance(value, int | float) else plain(value)


def join_words(words: list[str]) -> str:
    """Join words as in a sentence: `a, b and c`. Without words the text is empty."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def number(value: float, digits: int = 3) -> str:
    """Return a number as people write it: `5,720`, `0.25`, `4.2e-6`; never `5.72e+03`.

    It has `digits` significant digits; zeros at the end of a fraction are left out.
    """
    if value == 0 or not math.isfinite(value):
        return str(value) if value else "0"
    # The power of ten of the rounded value: 999.9 becomes 1,000, which has one digit more.
    power = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if -4 <= power < 9:
        text = f"{value:,.{max(0, digits - 1 - power)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def microseconds(value: float) -> str:
    """Return a time of `value` µs as text with three significant digits, in µs, ms or s."""
    scale, unit = time_unit(value)
    return f"{number(value / scale)} {unit}"


def time_unit(value: float) -> tuple[float, str]:
    """Return the unit in which to write a time of `value` µs: its length in µs, and its name.

    The limits are 999.5, since larger values are rounded to 1,000 of a unit.
    """
    if value < 999.5:
        return 1.0, "µs"
    return (1e3, "ms") if value < 999.5e3 else (1e6, "s")


def to_identifier(text: str) -> str:
    """Return a text as a name for configs and code: `jet pt` becomes `jet_pt`, `3d` becomes `_3d`.

    Each character that no name has becomes an underscore.
    """
    return re.sub(r"^(?=[0-9])|\W", "_", text, flags=re.ASCII)
