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
def test_a_histogram_of_pieces_is_that_of_all_values(pieces: list[list[float]]) -> None:
    """Any value is counted in one place; the first piece sets the edges."""
    arrays = [np.array(piece, "float32") for piece in pieces]
    histogram = Histogram.over(arrays[0])
    for array in arrays:
        histogram = histogram.plus(array)
    whole = np.concatenate(arrays).astype("float64")
    finite = whole[np.isfinite(whole)]
    assert histogram.finite == len(finite) and histogram.nonfinite == len(whole) - len(finite)
    assert histogram.below == (finite < histogram.low).sum()
    assert histogram.above == (finite > histogram.high).sum()
    counts, edges = np.histogram(finite, BINS, (histogram.low, histogram.high))
    assert list(histogram.counts) == counts.tolist()
    tolerance = 1e-9 * (histogram.high - histogram.low)
    assert histogram.edges() == pytest.approx(edges.tolist(), abs=tolerance)
    if len(finite):
        assert (histogram.least, histogram.largest) == (finite.min(), finite.max())
        size = max(abs(histogram.least), abs(histogram.largest))
        assert histogram.mean == pytest.approx(float(finite.mean()), abs=1e-9 * size)


@pytest.mark.parametrize(
    ("first", "low", "high"),
    [
        ([0.02, 0.97], 0.0, 1.0),
        ([0.02, 0.03], 0.02, 0.03),
        ([-2.0, 4.0, math.nan, math.inf], -2.0, 4.0),
        ([3.0, 3.0], 2.5, 3.5),
        ([math.nan], 0.0, 1.0),
    ],
    ids=["scores", "narrow", "wide", "one value", "none"],
)
def test_the_first_piece_sets_the_edges(first: list[float], low: float, high: float) -> None:
    histogram = Histogram.over(np.array(first))
    assert (histogram.low, histogram.high) == (low, high)


def test_values_beyond_the_edges_are_noted() -> None:
    histogram = Histogram.over(np.array([0.0, 10.0]))
    histogram = histogram.plus(np.array([-1.0, 5.0, 11.0, 12.0, math.nan]))
    assert list(histogram.notes()) == [
        "1 value is below 0", "2 values are above 10", "1 value is NaN or infinite"
    ]  # fmt: skip


def test_a_tail_is_beyond_the_edges() -> None:
    """Of a thousand values, a tenth."""
    assert Histogram.over(np.arange(1000.0), tail=0.1).high < 900
