"""Planted changes are found and named; unchanged files are not reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from runtime.errors import LoadError
from runtime.watch.counts import Counts
from runtime.watch.distance import LIMIT, Moved, drift
from runtime.watch.profile import KINDS, Bins, Profile, profiled
from runtime.watch.tally import counted

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
    return {f"c/{k}": shapes[k % 4 if k != 17 else 0]().astype(np.float32) for k in range(COLUMNS)}


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profiled([drawn(0)])


def moved(profile: Profile, values: dict[str, Array]) -> list[Moved]:
    columns = {key: counted(profile.columns[key].edges, own) for key, own in values.items()}
    return drift(profile, Counts(model="m", version="1", digest="d", columns=columns))


def reported(profile: Profile, values: dict[str, Array]) -> list[str]:
    return [each.column for each in moved(profile, values) if each.beyond(LIMIT)]


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


def test_the_words_say_what_changed(profile: Profile) -> None:
    values = drawn(1)
    with_nan(values)
    (first, *_) = moved(profile, values)
    assert first.changes[0] == "NaN: 0 % to 1 %"


@pytest.mark.parametrize("rows", [50, 100_000])
def test_of_unchanged_files_none_is_reported(rows: int) -> None:
    """A hundred files of 60 columns; the counts are drawn, not the values."""
    random = np.random.default_rng(rows + 1)
    shares = random.dirichlet(np.ones(16), COLUMNS)

    def counts(total: int) -> dict[str, list[int]]:
        return {
            f"c/{k}": [0] * len(KINDS) + random.multinomial(total, own).tolist()
            for k, own in enumerate(shares)
        }

    edges = list(map(float, range(17)))
    found = [
        each.column
        for _ in range(100)
        for each in drift(
            Profile(columns={k: Bins(edges=edges, counts=c) for k, c in counts(20_000).items()}),
            Counts(model="m", version="1", digest="d", columns=counts(rows)),
        )
        if each.beyond(0)
    ]
    assert found == []


def test_nothing_but_nan_and_nothing_at_all(profile: Profile) -> None:
    values = {"c/0": np.full(1000, np.nan, np.float32), "c/1": np.zeros(0, np.float32)}
    assert reported(profile, values) == ["c/0"]


def test_a_thousand_million_rows(profile: Profile) -> None:
    same = {key: [10_000 * each for each in own.counts] for key, own in profile.columns.items()}
    found = drift(profile, Counts(model="m", version="1", digest="d", columns=same))
    assert not any(each.beyond(LIMIT) for each in found)
    assert found[0].values == 10**9


@pytest.mark.parametrize(
    ("columns", "said"),
    [({"c/0": [1] * 7}, "other bins"), ({"else": [1] * 22}, "other bins")],
)
def test_counts_in_other_bins_are_refused(
    columns: dict[str, list[int]], said: str, profile: Profile
) -> None:
    with pytest.raises(LoadError, match=said):
        drift(profile, Counts(model="m", version="1", digest="d", columns=columns))
