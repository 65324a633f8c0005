"""Histograms that are filled in pieces, compared with NumPy's on all values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.histogram import BINS, Histogram

values = st.lists(st.floats(width=32), min_size=1, max_size=50)


@given(st.lists(values, min_size=1, max_size=4))
def test_pieces_are_the_whole(parts: list[list[float]]) -> None:
    """Any value is counted in one place; the first piece sets the edges."""
    arrays = [np.array(part, "float32") for part in parts]
    found = Histogram.over(arrays[0])
    for array in arrays:
        found = found.plus(array)
    whole = np.concatenate(arrays).astype("float64")
    finite = whole[np.isfinite(whole)]
    assert found.finite == len(finite) and found.nonfinite == len(whole) - len(finite)
    assert found.below == (finite < found.low).sum()
    assert found.above == (finite > found.high).sum()
    counts, edges = np.histogram(finite, BINS, (found.low, found.high))
    assert list(found.counts) == counts.tolist()
    near = 1e-9 * (found.high - found.low)
    assert found.edges() == pytest.approx(edges.tolist(), abs=near)
    if len(finite):
        assert (found.least, found.largest) == (finite.min(), finite.max())
        size = max(abs(found.least), abs(found.largest))
        assert found.mean == pytest.approx(float(finite.mean()), abs=1e-9 * size)


@pytest.mark.parametrize(
    ("first", "low", "high"),
    [
        ([0.02, 0.97], 0.0, 1.0),  # scores
        ([0.02, 0.03], 0.02, 0.03),
        ([-2.0, 4.0, math.nan, math.inf], -2.0, 4.0),
        ([3.0, 3.0], 2.5, 3.5),
        ([math.nan], 0.0, 1.0),
    ],
)
def test_edges(first: list[float], low: float, high: float) -> None:
    found = Histogram.over(np.array(first))
    assert (found.low, found.high) == (low, high)


def test_what_is_beyond_is_said() -> None:
    found = Histogram.over(np.array([0.0, 10.0])).plus(np.array([-1.0, 5.0, 11.0, 12.0, math.nan]))
    assert list(found.notes()) == [
        "1 value is below 0", "2 values are above 10", "1 value is NaN or infinite"
    ]  # fmt: skip
    assert Histogram.over(np.arange(1000.0), tail=0.1).high < 900
