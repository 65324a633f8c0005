"""Counts of values in bins, against NumPy."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from runtime.errors import LoadError
from runtime.watch.counts import Counter, Counts, read_counts
from runtime.watch.profile import BINS, KINDS, Bins, components, make_bins, make_profile
from runtime.watch.tally import count_values
from soa import Block, Collection, Layout, RowRange, Signature, column, eigen, scalar

Array = npt.NDArray[Any]
COUNTED = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "float16",
           "float32", "float64")  # fmt: skip


def by_numpy(edges: Array, values: Array) -> list[int]:
    """The counts of kinds, those beyond the edges, and of the bins, in the order of `Bins`."""
    wide = values.astype(np.float64)
    binned = wide[np.isfinite(wide) & (wide != 0)]
    kinds = [np.isnan(wide), wide == -np.inf, wide == np.inf, wide == 0]
    if len(edges) == 0:  # everything counts as above
        below, above = np.zeros(0), np.ones(len(binned))
    else:
        below, above = binned < edges[0], binned >= edges[-1]
    bins = [(binned >= low) & (binned < high) for low, high in pairwise(edges)]
    return [int(members.sum()) for members in (*kinds, below, above, *bins)]


@st.composite
def columns(draw: st.DrawFn) -> tuple[Array, Array]:
    """Values of a reference, and others of the same dtype."""
    dtype = np.dtype(draw(st.sampled_from(COUNTED)))
    exact = st.integers(-(2**53), 2**53) if dtype == np.int64 else None  # NumPy's side is float64
    values = arrays.arrays(dtype, st.integers(0, 60), elements=exact)
    return draw(values), draw(values)


@given(columns(), st.sampled_from([1, 100]))
def test_values_are_counted_as_numpy_counts_them(both: tuple[Array, Array], times: int) -> None:
    reference, other = both[0], np.tile(both[1], times)
    bins = make_bins(reference)
    edges = np.array(bins.edges)
    assert bins.counts == by_numpy(edges, reference)
    assert sum(bins.counts) == len(reference)
    assert count_values(bins.edges, other) == by_numpy(edges, other)


def test_denormal_numbers_are_zero_where_a_thread_takes_them_for_it() -> None:
    values = np.array([-1e-40, 1e-42, 0, 0.5, 1], np.float32)
    edges = make_bins(values).edges
    assert len(edges) == 5
    try:
        assert torch.set_flush_denormal(True)
        assert count_values(edges, values) == [0, 0, 0, 3, 0, 0, 0, 0, 1, 1]
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_whole_numbers_are_counted_between_any_edges(dtype: str) -> None:
    limits = np.iinfo(dtype)
    values = np.array([limits.min, 1, 2, 3, limits.max], dtype)
    edges = np.array([limits.min - 0.5, 1.5, 2.5, limits.max + 0.5, 1e30, math.inf])
    assert count_values(edges.tolist(), values) == by_numpy(edges, values)


def test_a_few_different_values_have_a_bin_each() -> None:
    charges = np.array([-1, 1, 1, 2, 0, 0, 0], np.int32)
    bins = make_bins(charges)
    assert bins.edges == [-1, 1, 2, 3]
    assert bins.counts == [0, 0, 0, 3, 0, 0, 1, 2, 1]


def test_many_values_are_in_bins_of_the_same_number() -> None:
    values = np.random.default_rng(1).normal(size=16_000)
    bins = make_bins(values)
    assert len(bins.edges) == BINS + 1
    assert all(abs(count - 16_000 / BINS) <= 1 for count in bins.counts[len(KINDS) :])


@pytest.mark.parametrize(
    "edges", [[1.0, 1.0], [1.0, math.nan], [math.nan], [-math.inf, 1.0]], ids=str
)
def test_bins_that_do_not_ascend_are_refused(edges: list[float]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        Bins(edges=edges, counts=[0] * (len(KINDS) + len(edges) - 1))


SIGNATURE = Signature.build(
    {
        "jets": Layout(
            [column("pt", "float32"), eigen("p", "float32", 2), scalar("rho", "float32")]
        ),
        "tags": Layout([column("score", "float32")]),
    },
    [Block("x", "jets", ("pt", "p")), Block("of_all", "jets", ("rho",))],
    [Block("score", "tags", ("score",))],
    {"n": RowRange(0, 100, (50,))},
)


def test_a_counter_takes_the_rows_in_use() -> None:
    keys = [component.key for component in components(SIGNATURE)]
    assert keys == ["jets/pt", "jets/p[0]", "jets/p[1]", "jets/rho", "tags/score"]
    profile = make_profile([{key: np.arange(1, 5, dtype=np.float32) for key in keys}])
    counter = Counter(profile, SIGNATURE)
    memory = {name: Collection(layout, 7) for name, layout in SIGNATURE.layouts.items()}
    memory["jets"]["pt"][:] = [1, 2, 2, np.nan, 0, 9, -1]
    counter.add(memory, {"jets": 5, "tags": 3})
    counter.add(memory, {"jets": 7, "tags": 0})
    counted = counter.counts("m", "1", "d" * 64)
    assert counted.calls == 2
    # NaN, -infinity, infinity, zero, below, above, then 1, 2, 3, 4.
    assert counted.columns["jets/pt"] == [2, 0, 0, 2, 1, 1, 2, 4, 0, 0]
    assert sum(counted.columns["jets/rho"]) == 2  # a scalar counts once a call
    assert sum(counted.columns["tags/score"]) == 3


def counts(digest: str, values: list[int]) -> Counts:
    """The counts of one call and one column."""
    return Counts(model="m", version="1", digest=digest, calls=1, columns={"jets/pt": values})


def test_files_of_one_version_add_up(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.json").write_text(counts("a", [i] * 6).to_json())
    total = read_counts(sorted(tmp_path.glob("*.json")), "a")
    assert (total.calls, total.columns) == (3, {"jets/pt": [0 + 1 + 2] * 6})


def test_a_folder_may_have_counts_of_other_versions(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(counts("a", [1] * 6).to_json())
    (tmp_path / "1.json").write_text(counts("b", [1] * 6).to_json())
    assert read_counts([tmp_path], "a").calls == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [(counts("b", [1] * 6).to_json(), "one version"), ("[]", "no counts"), ("{", "no counts"),
     (counts("a", [1] * 7).to_json(), "no counts"), (counts("a", []).to_json()[:-9], "no counts"),
     (counts("a", [1] * 6).to_json().replace("[1,", "[-1,"), "no counts: .*at least 0"),
     (counts("a", [1] * 6).to_json().replace("[1,", f"[{10**400},"), "no counts: .*at most"),
     (counts("a", [10**18] * 6).to_json(), "no counts of m/1: .*at most")],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(counts("a", [1] * 6).to_json())
    (tmp_path / "1.json").write_text(text)
    with pytest.raises(LoadError, match=message):
        read_counts(sorted(tmp_path.glob("*.json")), "a")


def test_counts_of_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(counts("a", [1] * 6).to_json())
    with pytest.raises(LoadError, match="another version"):
        read_counts([tmp_path / "0.json"], "b")


@pytest.mark.parametrize("name", ["", "none"])
def test_no_file_is_no_count(name: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="PIPELINE_WATCH"):
        read_counts([tmp_path / name], "a")


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(counts("a", [1] * 6).to_json())
    with pytest.raises(LoadError, match="cannot be read"):
        read_counts([tmp_path / "0.json", tmp_path / "typo.json"], "a")


def test_a_folder_that_is_missing_beside_others_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(counts("a", [1] * 6).to_json())
    with pytest.raises(LoadError, match="typo"):
        read_counts([tmp_path, tmp_path / "typo"], "a")


def test_a_file_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(counts("a", [1] * 6).to_json())
    assert read_counts([tmp_path / "0.json", tmp_path], "a").calls == 1
