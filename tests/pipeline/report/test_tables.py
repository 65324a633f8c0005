"""Tables on terminals of any width: nothing is cut off, and cells keep their words."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.tables import Table, new_table, show, table_lines, write
from pipeline.report.versions import (
    describe_benchmark,
    describe_decisions,
    describe_history,
    describe_versions,
    percent,
)
from registry.history.event_log import Event
from registry.promotion import Decision
from registry.version import Version
from soa.text import microseconds, number
from stages.reports import BenchmarkReport, Timing

SIZES = (1, 10, 100, 1000, 4096)
WHEN = datetime(2026, 11, 23, 10, 20, 30, tzinfo=UTC)


def lines(table: object, width: int) -> list[str]:
    """A table as lines of at most this many characters, if that can be."""
    assert isinstance(table, Table)
    return list(table_lines(table, width))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_read_back(value: float) -> None:
    text = number(value, 6)
    assert "e+" not in text and not re.search(r"e-?0", text)
    assert float(text.replace(",", "")) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (5720.0, "5,720"), (999.96, "1,000"), (0.25, "0.25"), (4.2e-6, "4.2e-6"),
        (5.7e11, "5.7e11"), (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_a_number_as_people_write_it(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (5.72, "5.72 µs"), (999.9, "1 ms"), (5720.0, "5.72 ms"), (999_900.0, "1 s"),
        (5.72e6, "5.72 s"), (4e9, "4,000 s"),
    ],
)  # fmt: skip
def test_a_time_has_the_unit_of_its_size(us: float, text: str) -> None:
    assert microseconds(us) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (1, "100%"), (1e-9, "<0.01%"), (0.99999, "99.99%"), (0.5, "50.00%")],
)
def test_a_share_is_neither_rounded_to_none_nor_to_all(share: float, text: str) -> None:
    assert percent(share) == text


NAMES = ("lanes", "eager, row-major", "the copies alone")
TIMING = Timing(11_654.0, 10_321.0, 15_250.0, 7)
REPORT = BenchmarkReport({f"n={n}": dict.fromkeys(NAMES, TIMING) for n in SIZES}, "lanes")


def test_five_sizes_fit_in_eighty_columns() -> None:
    """Each median is complete, with its spread below it."""
    shown = lines(describe_benchmark("a call", REPORT), 80)
    assert max(map(len, shown)) <= 80
    first, second = shown[3:5]
    assert first.split() == ["lanes", *["11.7", "ms"] * len(SIZES)]
    assert second.split() == ["chosen", *["10.3…15.2"] * len(SIZES)]


def test_sizes_that_do_not_fit_stand_below_each_other() -> None:
    text = " ".join(" ".join(lines(describe_benchmark("a call", REPORT), 40)).split())
    assert "n=4096 11.7 ms 10.3…15.2" in text


@pytest.mark.parametrize("width", [80, 120])
def test_history_breaks_no_time_no_alias_and_no_name(width: int) -> None:
    event = Event(
        "promotion", "particlenet", {"production": 1}, {"production": 2}, "production", 2,
        reason="looked at by the b-tagging group in the meeting of today", time=WHEN, number=3,
        state="done", by="ada@lxplus1234.cern.ch",
    )  # fmt: skip
    text = lines(describe_history("particlenet", [event] * 3), width)
    assert max(map(len, text)) <= width
    for word in ("2026-11-23 10:20:30", "@production", "ada@lxplus1234.cern.ch"):
        assert sum(word in line for line in text) == 3, word


def test_each_question_of_a_gate_names_its_target() -> None:
    targets = ("cpu/x86-64-v3", "cpu/x86-64-v4")
    decisions = [
        Decision("verified", True, "verified", "verified", f"{target} is verified (aoti)")
        for target in targets
    ]
    (table,) = describe_decisions("jets/1 to @production", decisions)
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == [(f"verified: {target}",) for target in targets]


def test_facts_stand_beside_their_names_whatever_their_length() -> None:
    table = new_table("", "", "", rows=[("digest", "ab" * 32), ("rows", "n: 0 … 5,000")])
    assert lines(table, 40) == ["digest  " + "ab" * 32, "rows    n: 0 … 5,000"]


def test_where_no_table_fits_each_row_is_by_itself() -> None:
    version = Version(
        "particlenet", 3, "ab" * 32, ("production", "staging"), {"cpu/x86-64-v3": "verified"},
        {"cpu/x86-64-v3": "onnxruntime"}, {}, WHEN, None, "", {},
    )  # fmt: skip
    shown = lines(describe_versions([version]), 40)
    assert max(map(len, shown)) <= 40
    assert shown[0] == "particlenet/3"
    assert "  aliases  @production @staging" in shown


words = st.text("abcdefghij@/é漢", min_size=1, max_size=30)


@given(
    st.lists(st.lists(st.lists(words, max_size=6).map(" ".join), min_size=3, max_size=3)),
    st.integers(30, 130),
)
def test_every_word_of_a_cell_is_shown(rows: list[list[str]], width: int) -> None:
    """Every word of a cell is complete."""
    table = new_table("a table", "name", "what", "why", rows=rows)
    shown = " ".join(lines(table, width)).split()
    assert {word for row in rows for cell in row for word in cell.split()} <= {*shown}


def test_characters_that_a_locale_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="latin-1") as out:
        monkeypatch.setattr("sys.stdout", out)
        show([new_table("5.7 µs … 6 → 漢", "a", "b", rows=[("x", "—")])])
        write("done — ok")
        out.flush()
        shown = raw.getvalue().decode("latin-1")
        assert shown.startswith("5.7 µs \\u2026 6 \\u2192 \\u6f22\na  b\n")


def test_a_list_of_versions_waits_for_no_heavy_import() -> None:
    check = (
        "import sys; from pipeline.report import describe_history, describe_versions, show\n"
        "show([describe_versions([]), describe_history('jets', [])])\n"
        "print([m for m in ('torch', 'matplotlib', 'jinja2', 'fastapi') if m in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert process.stdout.splitlines()[-1] == "[]"
