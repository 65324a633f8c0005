"""Planted changes are found and named; unchanged files are not reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from runtime.errors import LoadError
from runtime.watch.counts import Counts
from runtime.watch.distance import LIMIT, Moved, measure_drift
from runtime.watch.profile import BINS, KINDS, Bins, Profile, make_profile
from runtime.watch.tally import count_values

Array = npt.NDArray[Any]
COLUMNS, ROWS = 60, 100_000
SHIFTED = "c/17"


def drawn(seed: int, rows: int = ROWS) -> dict[str, Array]:
    """Columns of several shapes: normal, skewed, integers, with many zeros."""
    random = np.random.default_rng(seed)
    shapes: list[Callable[[], Array]] = [
        lambda: random.normal(size=rows),
        lambda: random.exponential(size=rows),
        lambda: random.poisson(3.0, rows),
        lambda: np.where(random.random(rows) < 0.6, 0.0, random.normal(5.0, 1.0, rows)),
    ]
    shape_of = {f"c/{i}": i % len(shapes) for i in range(COLUMNS)} | {SHIFTED: 0}
    return {key: shapes[shape]().astype(np.float32) for key, shape in shape_of.items()}


@pytest.fixture(scope="module")
def profile() -> Profile:
    """The bins of the columns, as they were when the version was built."""
    return make_profile([drawn(0)])


def moved(profile: Profile, values: dict[str, Array]) -> list[Moved]:
    """The distance of each column from the profile, the largest one first."""
    columns = {
        key: count_values(profile.columns[key].edges, column) for key, column in values.items()
    }
    return measure_drift(profile, Counts(model="m", version="1", digest="d", columns=columns))


def reported(profile: Profile, values: dict[str, Array]) -> list[str]:
    """The columns that moved beyond the limit."""
    return [item.column for item in moved(profile, values) if item.beyond(LIMIT)]


def shifted(values: dict[str, Array]) -> None:
    values[SHIFTED] += np.float32(0.1)


def in_other_units(values: dict[str, Array]) -> None:
    values["c/5"] *= np.float32(1000)


def with_nan(values: dict[str, Array]) -> None:
    values["c/8"][::100] = np.nan


def swapped(values: dict[str, Array]) -> None:
    values["c/4"], values["c/6"] = values["c/6"], values["c/4"]


def constant(values: dict[str, Array]) -> None:
    values["c/2"][:] = 1


@pytest.mark.parametrize(
    ("change", "columns"),
    [(shifted, {SHIFTED}), (in_other_units, {"c/5"}), (with_nan, {"c/8"}),
     (swapped, {"c/4", "c/6"}), (constant, {"c/2"})],
)  # fmt: skip
def test_a_change_is_found_and_named(
    change: Callable[[dict[str, Array]], None], columns: set[str], profile: Profile
) -> None:
    values = drawn(1)
    change(values)
    assert set(reported(profile, values)) == columns


def test_a_change_is_described_in_percent(profile: Profile) -> None:
    values = drawn(1)
    with_nan(values)
    (first, *_) = moved(profile, values)
    assert first.changes[0] == "NaN: 0 % to 1 %"


@pytest.mark.parametrize("rows", [50, 100_000])
def test_of_unchanged_files_none_is_reported(rows: int) -> None:
    """A hundred files of 60 columns; the counts are drawn, not the values."""
    random = np.random.default_rng(rows + 1)
    shares = random.dirichlet(np.ones(BINS), COLUMNS)  # of the bins of each column
    edges = [float(edge) for edge in range(BINS + 1)]

    def draw(total: int) -> dict[str, list[int]]:
        return {
            f"c/{i}": [0] * len(KINDS) + random.multinomial(total, own).tolist()
            for i, own in enumerate(shares)
        }

    for _ in range(100):
        bins = {key: Bins(edges=edges, counts=counts) for key, counts in draw(20_000).items()}
        counts = Counts(model="m", version="1", digest="d", columns=draw(rows))
        distances = measure_drift(Profile(columns=bins), counts)
        assert [item.column for item in distances if item.beyond(0)] == []


def test_a_column_of_nan_is_reported_and_one_without_values_is_not(profile: Profile) -> None:
    values = {"c/0": np.full(1000, np.nan, np.float32), "c/1": np.zeros(0, np.float32)}
    assert reported(profile, values) == ["c/0"]


def test_a_thousand_million_unchanged_rows_are_not_reported(profile: Profile) -> None:
    times = 10**9 // ROWS
    same = {key: [times * n for n in bins.counts] for key, bins in profile.columns.items()}
    distances = measure_drift(profile, Counts(model="m", version="1", digest="d", columns=same))
    assert not any(item.beyond(LIMIT) for item in distances)
    assert distances[0].values == 10**9


@pytest.mark.parametrize(
    ("columns", "message"),
    [({"c/0": [1] * 7}, "other bins"), ({"else": [1] * 22}, "other bins")],
)
def test_counts_in_other_bins_are_refused(
    columns: dict[str, list[int]], message: str, profile: Profile
) -> None:
    with pytest.raises(LoadError, match=message):
        measure_drift(profile, Counts(model="m", version="1", digest="d", columns=columns))
