from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling.batcher import Batching

SIZES = st.lists(st.integers(1, 40), max_size=30)


@pytest.mark.parametrize(
    ("batching", "waiting", "oldest_s", "taken"),
    [
        (Batching(), [1, 1, 1], 0.0, 1),
        (Batching(8), [1, 1, 1], 0.0, 3),
        (Batching(8), [4, 4, 4], 0.0, 2),
        (Batching(8), [9], 0.0, 1),  # a server refuses such a request before it is batched
        (Batching(8, (2,)), [1, 1, 1], 0.0, 2),
        (Batching(8, (2, 4)), [1] * 7, 0.0, 4),
        (Batching(8, (6,)), [1, 1, 1], 0.0, 3),
        (Batching(8, (6,), 0.1), [1, 1, 1], 0.05, 0),  # other requests may still come
        (Batching(8, (6,), 0.1), [1, 1, 1], 0.1, 3),
        (Batching(8, (2,), 0.1), [1, 1, 1], 0.05, 2),
        (Batching(8, (), 0.1), [4, 4, 4], 0.0, 2),  # a third request would not fit
        (Batching(8, (), 0.1), [4, 2], 0.0, 0),
    ],
)
def test_what_runs_now(batching: Batching, waiting: list[int], oldest_s: float, taken: int) -> None:
    assert batching.take(waiting, oldest_s) == taken


@given(SIZES, st.integers(40, 100), st.sets(st.integers(1, 100)), st.floats(0, 1), st.floats(0, 1))
def test_a_batch_fits_and_nobody_waits_for_ever(
    waiting: list[int], most: int, preferred: set[int], delay_s: float, oldest_s: float
) -> None:
    batching = Batching(most, tuple(sorted(preferred)), delay_s)
    taken = batching.take(waiting, oldest_s)
    assert sum(waiting[:taken]) <= most
    if waiting and oldest_s >= delay_s:
        assert taken
