"""Windows: rows of a larger collection in the same memory, with its pitch, and no other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soa import Block, RowRange, Signature
from soa.errors import CollectionError
from soa.layout import Layout, column, eigen, opaque, scalar
from soa.memory import Collection, argument_spans
from tests.soa.strategies import ROWS, layouts, values_of

MEMBERS = [
    column("x", "float32"),
    eigen("m", "float32", 2, 2),
    column("q", "int8"),
    scalar("run", "uint32"),
    opaque("hit", 12),
]
STORAGES = ["buffer", "columns"]


def filled(storage: Any, n: int = 50) -> Collection:
    """n rows, numbered in every column, with room for five more."""
    collection = Collection(Layout(MEMBERS, storage=storage), n, capacity=n + 5)
    collection.fill("x", np.arange(n, dtype="f4"))
    collection.fill("m", np.arange(4 * n, dtype="f4").reshape(n, 2, 2))
    collection.fill("q", np.arange(n).astype("i1"))
    collection.fill("run", np.array(7, "u4"))
    collection.fill("hit", np.arange(3 * n, dtype="f4").reshape(n, 3))
    return collection


each_window = pytest.mark.parametrize(
    ("start", "stop"), [(0, 50), (10, 20), (33, 34), (17, 17), (50, 50)]
)


@pytest.mark.parametrize("storage", STORAGES)
@each_window
def test_a_window_is_those_rows(storage: Any, start: int, stop: int) -> None:
    whole = filled(storage)
    rows = whole.window(start, stop)
    n = stop - start
    assert (rows.n, rows.capacity, rows.start, rows.whole) == (n, n, start, whole)
    for name in ("x", "q", "hit"):
        assert rows[name].tobytes() == whole[name][start:stop].tobytes()
        if rows.n:
            assert rows[name].ctypes.data == whole[name][start:].ctypes.data
    assert rows.tensor("x").tolist() == whole["x"][start:stop].tolist()
    assert int(rows["run"]) == 7
    for k in range(4):
        assert rows.component("m", k).tolist() == whole.component("m", k)[start:stop].tolist()


@pytest.mark.parametrize("storage", STORAGES)
@each_window
def test_a_copy_of_a_window_is_a_whole_collection(storage: Any, start: int, stop: int) -> None:
    rows = filled(storage).window(start, stop)
    copy = rows.to("cpu")
    assert copy["hit"].tobytes() == rows["hit"].tobytes() and copy.whole is copy


def test_a_window_of_a_window_is_one_of_the_whole() -> None:
    whole = filled("buffer")
    rows = whole.window(10, 40).window(5, 25)
    assert (rows.start, rows.n, rows.whole) == (15, 20, whole)


def test_fewer_rows_of_a_window_are_its_first_ones() -> None:
    rows = filled("buffer").window(10, 40).window(5, 25).rows(3)
    assert (rows.start, rows["x"].tolist()) == (15, [15, 16, 17])


def test_a_window_writes_its_rows_only() -> None:
    whole = filled("buffer")
    whole.window(10, 40).window(5, 25)["x"][:] = -1
    assert whole["x"][14:36].tolist() == [14, *[-1] * 20, 35]


def test_a_matrix_keeps_the_pitch_of_the_whole() -> None:
    whole = filled("buffer")
    signature = Signature.build(
        {"i": whole.layout, "o": Layout([column("y", "float32")])},
        [Block("a", "i", ("x", "m"))],
        [Block("b", "o", ("y",))],
        {"n": RowRange(0, 99)},
    )
    out = Collection(signature.layouts["o"], 200).window(7, 17)
    windows = {"i": whole.window(10, 20), "o": out}
    _, matrix, answer = argument_spans(signature, windows, {"n": 10})
    assert matrix.shape == (5, whole.layout.padded_length("x", 55))
    assert matrix.address == whole.data_ptr + 10 * 4  # float32
    assert answer.address == out.whole.data_ptr + 7 * 4
    assert matrix.tensor()[1, :10].tolist() == [float(4 * i) for i in range(10, 20)]
    assert matrix.numpy()[0, :10].tolist() == list(range(10, 20))


def test_the_memory_of_a_window_is_that_of_its_rows() -> None:
    """In a span for each component: x, four of m, q, run and hit."""
    rows = filled("buffer").window(3, 9)
    assert rows.buffer is None and len(rows.spans()) == 8
    assert sum(span.nbytes for span in rows.spans()) == 6 * (4 + 16 + 1 + 12) + 4


def test_a_window_has_no_single_address() -> None:
    rows = filled("buffer").window(3, 9)
    with pytest.raises(CollectionError, match="one address each"):
        _ = rows.data_ptr


@pytest.mark.parametrize(("start", "stop"), [(0, 51), (5, 4), (-1, 3), (0.0, 1)])
def test_a_window_of_rows_that_are_not_there_is_refused(start: Any, stop: Any) -> None:
    with pytest.raises(CollectionError):
        filled("buffer").window(start, stop)


@given(layouts(storages=("buffer", "columns")), ROWS, st.integers(0, 99), st.integers(0, 9))
def test_a_window_of_any_layout_begins_at_its_first_row(
    layout: Layout, n: int, start: int, seed: int
) -> None:
    whole = Collection.from_arrays(layout, values_of(layout, n, seed), n, capacity=n + seed)
    rows = whole.window(min(start, n), n)
    for member in layout.columns:
        for k in range(member.components):
            window, of_whole = rows.span(member.name, k), whole.span(member.name, k)
            first = 0 if member.kind == "scalar" else rows.start
            before = first * of_whole.nbytes // max(1, of_whole.shape[0])
            assert window.address == of_whole.address + before
        if member.kind != "scalar" and rows.n and rows.start % layout.row_step == 0:
            assert rows.span(member.name).address % layout.alignment_of(member.name) == 0
