"""The results of a benchmark, printed as tables of up to 132 characters in a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.building.provenance import host, tools
from pipeline.report.tables import new_table, show
from stages.reports import Timing

WIDTH = 132
SPREAD = "below each median its spread, p05 … p95"


@dataclass(frozen=True)
class Cell:
    """A median with its 5th and 95th percentile, or one value; `ratio`: to the base's value."""

    value: float
    low: float | None = None
    high: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Panel:
    """Rows that are printed as one table. `x`: what the columns are; `unit` is µs, MB, or a count
    per second."""

    title: str
    x: str
    unit: Literal["µs", "MB", "1/s"]
    columns: tuple[float, ...] | tuple[str, ...]
    rows: Mapping[str, tuple[Cell | None, ...]]


def race_panel(title: str, x: str, races: Mapping[int, Mapping[str, Timing]], base: str) -> Panel:
    """A row for each contestant, a column for each size; ratios to `base` if it was timed."""
    names = list(dict.fromkeys(name for race in races.values() for name in race))

    def cell(name: str, race: Mapping[str, Timing]) -> Cell | None:
        if name not in race:
            return None
        timing = race[name]
        ratio = timing.median_us / race[base].median_us if base in race else None
        return Cell(timing.median_us, timing.p05_us, timing.p95_us, ratio)

    rows = {name: tuple(cell(name, race) for race in races.values()) for name in names}
    return Panel(title, x, "µs", tuple(races), rows)


def spread(timing: Timing) -> str:
    """The 5th to the 95th percentile, as a part of the median."""
    return f"{(timing.p95_us - timing.p05_us) / timing.median_us:.0%}"


def machine() -> str:
    """This host and its torch, in one line."""
    facts = {**host(), "torch": tools().get("torch", "?")}
    return ", ".join(f"{key}: {value}" for key, value in facts.items())


def print_machine() -> None:
    """Print which host this is."""
    show([machine()])


def print_panels(caption: str, panels: Iterable[Panel]) -> None:
    """Print a caption, and one table for each panel."""
    print(caption)
    for panel in panels:
        headers = [c if isinstance(c, str) else f"{c:,.0f}" for c in panel.columns]
        names = list(panel.rows)
        texts = [[_cell_text(cell, panel.unit) for cell in cells] for cells in panel.rows.values()]
        if len(headers) > len(names):  # transpose, so that the table is narrow
            headers, names = names, headers
            texts = [list(cells) for cells in zip(*texts, strict=True)]
        table = new_table(panel.title, panel.x, *headers)
        for name, cells in zip(names, texts, strict=True):
            table.add_row(name, *cells)
        show([table], WIDTH)


def _cell_text(cell: Cell | None, unit: str) -> str | tuple[str, str]:
    """`6.44 µs x1.00`, and its spread in the same unit below."""
    if cell is None:
        return ""
    style = _style(cell.value, unit)
    median = f"{style.number(cell.value)}{style.suffix}"
    if cell.ratio is not None:
        median += f" x{cell.ratio:.2f}"
    if cell.low is None or cell.high is None:
        return median
    return median, f"{style.number(cell.low)} … {style.number(cell.high)}"


@dataclass(frozen=True)
class _Style:
    """How a value and its spread are printed: divided by `scale`, with these digits. `suffix`: the
    unit behind the value."""

    scale: float
    digits: str
    suffix: str = ""

    def number(self, value: float) -> str:
        return f"{value / self.scale:{self.digits}}"


def _style(value: float, unit: str) -> _Style:
    """The style of a value in `unit`; a time is in µs, and gets the unit that fits it."""
    if unit == "MB":
        return _Style(1.0, ".1f")
    if unit == "1/s":
        return _Style(1.0, ",.0f")
    if value < 1e3:
        return _Style(1.0, ".3g", " µs")
    if value < 1e6:
        return _Style(1e3, ".3g", " ms")
    return _Style(1e6, ".3g", " s")
