"""Columns of files as arrays of Arrow."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pipeline.applying.columns import fill_items

LISTS = pa.array([[7.0], [None, 1.0], [], [2.0, None]], pa.list_(pa.float32()))


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_items_that_are_null_are_filled_also_in_a_slice(kind: type[pa.ListArray]) -> None:
    lists = LISTS.cast(kind(pa.float32())).slice(1)
    filled = fill_items(lists, 0.5)
    assert (filled.type, filled.offsets) == (lists.type, lists.offsets)
    assert filled.to_pylist() == [[0.5, 1.0], [], [2.0, 0.5]]


def test_a_list_that_is_null_stays_so() -> None:
    lists = pa.array([None, [None]], pa.list_(pa.float32()))
    assert fill_items(lists, 0.5).to_pylist() == [None, [None]]


def test_a_fill_value_that_the_dtype_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"int32, which cannot hold the fill value 0\.5"):
        fill_items(pa.array([[None, 1]], pa.list_(pa.int32())), 0.5)
