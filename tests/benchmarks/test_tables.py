"""The tables and plots of the benchmarks. No time is checked."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.plot import save_plot
from benchmarks.table import WIDTH, Cell, Panel, print_panels, race_panel
from stages.reports import Timing

RACES = {
    n: {"ours": Timing(n * 1.0, n * 0.9, n * 1.2, 7), "theirs": Timing(n * 3.0, n * 2.0, n * 4, 7)}
    for n in (1, 1000, 2_000_000)
}
PANELS = [
    race_panel("a race", "rows", RACES, "ours"),
    Panel(
        "memory", "", "MB", "MB", "bars", ("RSS", "PSS"), {"ours": (Cell(105.0), Cell(27.25)),
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


def test_a_plot_is_an_svg_and_the_same_every_time(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        save_plot("both", "a caption", PANELS, tmp_path / folder)
    first, second = ((tmp_path / folder / "both.svg").read_bytes() for folder in ("one", "two"))
    assert first == second
    root = ElementTree.fromstring(first)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = {
        "".join(each.itertext()).strip() for each in root.iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"a caption", "a race", "ours", "theirs"} <= texts
