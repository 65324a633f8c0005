"""How results are shown to people: lines and tables, printed by `show` alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from soa.text import plain

Part = str | Table
"""What a report yields: a line, or a table of `new_table`."""


def microseconds(value: float) -> str:
    """Three significant digits, in µs, ms or s."""
    for limit, scale, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms")):
        if value < limit:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e6:.3g} s"


class _Console(Console):
    """Prints text as text (soa/text.py), and a line as a line, however long."""

    def print(self, *objects: Any, **how: Any) -> None:
        lines = all(isinstance(each, str) for each in objects)
        super().print(*map(_as_text, objects), soft_wrap=lines, **how)


class _Table(Table):
    def add_row(self, *cells: Any, **how: Any) -> None:
        super().add_row(*map(_as_text, cells), **how)


def _as_text(shown: Any) -> Any:
    return Text(plain(shown)) if isinstance(shown, str) else shown


def console() -> Console:
    """The terminal's width; 140 columns where the output goes to a file or a pipe."""
    return _Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def show(parts: Iterable[Part]) -> None:
    """Print a report on stdout."""
    out = console()
    for part in parts:
        out.print(part)


def new_table(title: str, *columns: str, rows: Iterable[Iterable[str]] = ()) -> Table:
    """A table whose cells may hold anybody's text: nothing in it is markup."""
    table = _Table(
        title=Text(plain(title, "\n"), "table.title"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for i, column in enumerate(columns):
        table.add_column(_as_text(column), justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
