"""Several column names in one entry: ranges and patterns."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import Config, load_config
from pipeline.config.name_ranges import expand_names, shorten_names
from pipeline.errors import ConfigError

MINIMAL = (Path(__file__).parent / "minimal.yaml").read_text()
words = st.from_regex(r"[A-Za-z_]{1,5}", fullmatch=True)
separators = st.sampled_from([" … ", " .. ", "..", " ... "])


def load(folder: Path, columns: str, block: str) -> Config:
    """A config with these columns, of which the only input has those of `block`."""
    text = MINIMAL.replace("{name: x, dtype: float32}", columns).replace("[x]", block)
    (folder / "c.yaml").write_text(text)
    return load_config(folder / "c.yaml")


@given(
    words,
    words | st.just(""),
    st.integers(0, 99),
    st.integers(1, 40),
    st.integers(1, 4),
    separators,
)
def test_a_range_is_its_names(
    front: str, behind: str, low: int, steps: int, width: int, dots: str
) -> None:
    names = [f"{front}{k:0{width}}{behind}" for k in range(low, low + steps + 1)]
    assert expand_names(f"{names[0]}{dots}{names[-1]}") == names


@given(words, st.integers(1, 99), st.integers(0, 99))
def test_a_range_that_does_not_grow_is_none(front: str, low: int, fewer: int) -> None:
    with pytest.raises(ValueError, match=r"part0 \.\. part15"):
        expand_names(f"{front}{low} .. {front}{max(0, low - fewer)}")


@pytest.mark.parametrize(
    "written",
    ["a .. b", "a1 .. b2", "a1 .. a2 .. a3", "..", "a1 ..", ".. a1", "a0 .. a99999", "a01 .. a2",
     "a0_b1 .. a1_b2", "a1 .. a1", "a9999999999 .. a99999999999"],
)  # fmt: skip
def test_text_that_is_no_range_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="found"):
        expand_names(written)


@given(st.text(max_size=30))
def test_any_text_is_names_or_a_value_error(text: str) -> None:
    try:
        assert expand_names(text, ["part0", "part1"])
    except ValueError as error:
        assert str(error)


@given(st.lists(words, unique=True, max_size=8), words)
def test_a_pattern_takes_what_fits_in_its_order(names: list[str], front: str) -> None:
    fitting = [name for name in names if name.startswith(front)]
    if fitting:
        assert expand_names(f"{front}*", names) == fitting
    else:
        with pytest.raises(ValueError, match="no column fits it"):
            expand_names(f"{front}*", names)


def test_a_range_declares_columns_and_a_pattern_names_them(folder: Path) -> None:
    config = load(folder, "{name: pt, dtype: int8}, {name: x0 … x2, dtype: float32}", "['x*']")
    assert [c.name for c in config.collections["c"].columns] == ["pt", "x0", "x1", "x2", "y"]
    assert config.inputs[0].columns == ("x0", "x1", "x2")


@pytest.mark.parametrize("block", ["[x0 .. x2]", "[x0, x1, x2]"])
def test_ranges_have_the_digest_of_their_names(folder: Path, block: str) -> None:
    short = load(folder, "{name: x0 … x2, dtype: float32}", "['x*']").digest()
    columns = ", ".join(f"{{name: x{i}, dtype: float32}}" for i in range(3))
    assert load(folder, columns, block).digest() == short


def test_each_column_of_a_range_has_its_shape(folder: Path) -> None:
    config = load(folder, "{name: x0 .. x3, dtype: float32, eigen: [2]}", "[x0 .. x3]")
    assert [c.eigen for c in config.collections["c"].columns[:4]] == [(2,)] * 4


@pytest.mark.parametrize(
    ("columns", "block", "says"),
    [
        ("{name: x, dtype: float32}", "['z*']", "inputs[0].columns[0]: no column fits it"),
        ("{name: x0 .. y, dtype: float32}", "[x]", "collections.c.columns[0]: found"),
        ("{name: x0 .. x2, dtype: float32}", "[x0 .. x3]", "inputs[0].columns[3]: found 'x3'"),
        (
            "{name: x0 .. x2, dtype: flot32}",
            "[x0]",
            "collections.c.columns[0].dtype: found 'flot32'",
        ),
        ("{name: x0 .. x2, dtype: float32}", "[x*, x0]", "names column 'x0' twice"),
    ],
)
def test_a_mistake_with_a_range_has_its_place(
    folder: Path, columns: str, block: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, columns, block)
    assert says in str(caught.value)


def test_lines_are_those_of_the_file(folder: Path) -> None:
    """Entries after a range keep their own line numbers."""
    columns = "\n".join([
        "{name: x0 .. x20, dtype: float32},",
        "    {name: a, dtype: float32},",
        "    {name: b, dtype: flot32}",
    ])  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load(folder, columns, "[a]")
    lines = (folder / "c.yaml").read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if "flot32" in line)
    assert [problem.split(":")[1] for problem in caught.value.problems] == [str(number)]


@given(st.lists(st.from_regex(r"[ab][0-9]{1,2}(_[0-9])?", fullmatch=True), max_size=12))
def test_in_short_names_the_same(names: list[str]) -> None:
    assert [name for part in shorten_names(names) for name in expand_names(part)] == names


@given(words, st.integers(0, 99), st.integers(3, 40), words)
def test_a_run_of_names_is_one_range_in_short(front: str, low: int, count: int, other: str) -> None:
    names = [f"{front}{k}" for k in range(low, low + count)]
    assert shorten_names([other, *names]) == [other, f"{names[0]} .. {names[-1]}"]
