"""The tables of the benchmarks. No time is checked."""

from __future__ import annotations

import pytest

from benchmarks.table import WIDTH, Cell, Panel, print_panels, race_panel
from stages.reports import Timing

RACES = {
    n: {"ours": Timing(n * 1.0, n * 0.9, n * 1.2, 7), "theirs": Timing(n * 3.0, n * 2.0, n * 4, 7)}
    for n in (1, 1000, 2_000_000)
}
PANELS = [
    race_panel("a race", "rows", RACES, "ours"),
    Panel(
        "memory", "", "MB", ("RSS", "PSS"), {"ours": (Cell(105.0), Cell(27.25)),
                                                           "theirs": (Cell(112.0), None)},
    ),
]  # fmt: skip


def test_a_table_fits_and_says_medians_ratios_and_spreads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_panels("a caption", PANELS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a caption"
    assert max(len(line.rstrip()) for line in lines) <= WIDTH
    text = "\n".join(lines)
    for shown in ("1 µs x1.00", "3 ms x3.00", "6 s x3.00", "2 … 4", "27.2", "2,000,000"):
        assert shown in text, shown
