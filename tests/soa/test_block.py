"""Which plan a block gets, and that the plan gives the model's row-major tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from soa.block import Block, Plan, plan_block
from soa.dtypes import DTYPES, itemsize
from soa.errors import BlockError
from soa.layout import Column, Layout, column, eigen, opaque, scalar
from soa.memory import Collection
from tests.soa.strategies import ROWS, layouts, values_of

Array = np.ndarray[Any, Any]

LAYOUT = Layout(
    [
        column("pt", "float32"),
        column("eta", "float32"),
        column("phi", "float32"),
        column("q", "int8"),
        eigen("dir", "float32", 2),
        eigen("cov", "float32", 2, 3),
        scalar("run", "uint32"),
        scalar("lumi", "uint32"),
        column("mass", "float32"),
    ]
)
APART = Layout(LAYOUT.columns, storage="columns")
CARRIES = Layout([*LAYOUT.columns, opaque("hit", 12), column("event", "uint64")])


def plan(*names: str, layout: Layout = LAYOUT, **options: Any) -> Plan:
    """The plan of a block of these columns."""
    return plan_block(Block("features", "jets", names, **options), layout)


# -- which plan ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "first", "order", "shape"),
    [
        (("pt", "eta", "phi"), ("pt", 0), (0, 1, 2), (3,)),
        (("phi", "pt", "eta"), ("pt", 0), (2, 0, 1), (3,)),
        (("cov",), ("cov", 0), (0, 2, 4, 1, 3, 5), (2, 3)),  # row by row, from column-major
        (("cov", "dir"), ("dir", 0), (2, 4, 6, 3, 5, 7, 0, 1), (8,)),
        (("q",), ("q", 0), (0,), (1,)),
    ],
)
def test_adjacent_columns_of_one_dtype_are_a_matrix(
    names: tuple[str, ...], first: tuple[str, int], order: Any, shape: Any
) -> None:
    matrix = plan(*names)
    assert (matrix.kind, matrix.components[0], matrix.order) == ("matrix", first, order)
    assert matrix.identity == (sorted(order) == [*order])
    assert matrix.dtypes == (LAYOUT[names[0]].dtype,)
    assert matrix.feature_shape == shape


@pytest.mark.parametrize(
    "names", [("pt", "eta", "phi"), ("phi", "pt", "eta"), ("cov",), ("cov", "dir"), ("q",)]
)
def test_separate_columns_are_no_matrix(names: tuple[str, ...]) -> None:
    assert plan(*names, layout=APART).kind == "columns"


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("pt", "phi"), {}),  # eta lies between them
        (("cov", "mass"), {}),  # the scalars lie between them
        (("phi", "q"), {"dtype": "float32"}),  # adjacent, but of two dtypes
        (("phi", "dir"), {}),  # q lies between them
    ],
)
def test_other_columns_stay_columns(names: tuple[str, ...], options: dict[str, Any]) -> None:
    columns = plan(*names, **options)
    wanted = [LAYOUT[name] for name in names]
    assert columns.kind == "columns"
    assert columns.components == tuple(
        (m.name, m.component_of(i)) for m in wanted for i in range(m.components)
    )
    assert columns.dtypes == tuple(m.dtype for m in wanted for _ in range(m.components))
    assert columns.identity


def test_a_matrix_in_separate_columns_is_read_row_by_row() -> None:
    components = plan("cov", layout=APART).components
    assert components == tuple(("cov", k) for k in (0, 2, 4, 1, 3, 5))


def test_scalars_have_a_plan_without_rows() -> None:
    scalars = plan("lumi", "run")
    assert scalars.kind == "scalars"
    assert scalars.components == (("lumi", 0), ("run", 0))
    assert scalars.dtypes == ("uint32", "uint32")
    assert scalars.feature_shape == (2,)


def test_the_model_gets_the_dtype_of_the_block_or_of_its_columns() -> None:
    assert plan("q", "pt", dtype="float16").dtype == "float16"
    assert plan("pt").dtype == "float32"


def test_a_block_may_have_another_shape_than_its_columns() -> None:
    assert plan("pt", "eta", "phi", shape=(3, 1)).feature_shape == (3, 1)
    assert plan("cov", shape=(6,)).feature_shape == (6,)


@pytest.mark.parametrize(
    ("names", "options", "says"),
    [
        ((), {}, "block 'features' names no columns"),
        (("pt", "eta", "pt"), {}, "block 'features' names column 'pt' twice"),
        (("energy",), {}, "block 'features', collection 'jets': no column 'energy'"),
        (("pt", "run"), {}, r"block 'features' mixes scalars \(run\) with columns"),
        (("pt", "q"), {}, "block 'features' has columns of float32, int8: say which dtype"),
        (("pt",), {"dtype": "float"}, "block 'features': unknown dtype 'float'"),
        (("hit",), {"layout": CARRIES}, "names 'hit', which is opaque12: .* no model reads"),
        (("event",), {"layout": CARRIES}, "names 'event', which is uint64: .* no model reads"),
        (("pt", "eta"), {"shape": (3,)}, r"block 'features': shape \[3\] .* 2 components"),
        (("pt",), {"broadcast": True}, "block 'features' has broadcast, which is for scalars"),
        (("pt", "eta"), {"shape": (-1, -2)}, r"block 'features': shape \[-1, -2\]"),
    ],
)
def test_blocks_that_cannot_be_are_refused(names: tuple[str, ...], options: Any, says: str) -> None:
    with pytest.raises(BlockError, match=says):
        plan(*names, **options)


# -- following a plan, in NumPy and from bytes alone --------------------------------------------


def decode(data: bytes, dtype: str) -> Array:
    """Numbers of any dtype as float64; a bfloat16 holds the upper half of a float32's bits."""
    if dtype == "bfloat16":
        upper = np.frombuffer(data, "<u2").astype("<u4") << 16
        return upper.view("<f4").astype("f8")
    return np.frombuffer(data, dtype).astype("f8")


def read_column(collection: Collection, name: str, k: int, length: int) -> Array:
    """`length` elements of a physical column, from the address that the layout gives."""
    layout = collection.layout
    size = itemsize(layout[name].dtype) * length
    if collection.buffer is None:
        data = bytes(collection.span(name, k).tensor().view(torch.uint8).numpy())
        return decode(data[:size], layout[name].dtype)
    at = layout.offsets(collection.capacity)[name] + k * layout.pitch(name, collection.capacity)
    return decode(bytes(collection.buffer.numpy())[at : at + size], layout[name].dtype)


def gather(collection: Collection, block: Plan) -> Array:
    """What the graph computes from a block's arguments: `(n, F)` or `(F,)`."""
    if block.kind == "matrix":
        name, k = block.components[0]
        length = collection.layout.padded_length(name, collection.capacity)
        count = len(block.components)
        matrix = read_column(collection, name, k, count * length).reshape(count, length)
        return matrix[:, : collection.n].T[:, list(block.order)]
    length = 1 if block.kind == "scalars" else collection.n
    columns = [read_column(collection, name, k, length) for name, k in block.components]
    stacked = np.stack(columns, axis=-1)[:, list(block.order)]
    return stacked[0] if block.kind == "scalars" else stacked


def row_major(members: list[Column], values: dict[str, torch.Tensor], n: int) -> Array:
    """The array that the model gets: a row for each element, with its numbers side by side."""
    columns = [values[m.name].double().reshape(n, m.components).numpy() for m in members]
    return np.concatenate(columns, axis=1)


KINDS = {
    "any": layouts(storages=("buffer", "buffer", "columns")),
    # With one dtype and one storage, nearly every selection of adjacent columns is a matrix.
    "matrix": st.sampled_from(DTYPES).flatmap(lambda dtype: layouts(dtypes=(dtype,))),
}


@pytest.mark.parametrize("kind", KINDS)
@given(ROWS, st.integers(0, 40), st.integers(0, 99), st.data())
def test_a_plan_gives_the_row_major_tensor(
    kind: str, n: int, spare: int, seed: int, data: st.DataObject
) -> None:
    layout = data.draw(KINDS[kind])
    scalars = data.draw(st.booleans())
    candidates = [c for c in layout.columns if (c.kind == "scalar") == scalars]
    assume(candidates)
    picked = data.draw(st.permutations(candidates))[: data.draw(st.integers(1, len(candidates)))]
    block = plan_block(Block("b", "c", tuple(c.name for c in picked), "float64"), layout)
    values = values_of(layout, n, seed)
    collection = Collection.from_arrays(layout, values, n, capacity=n + spare)
    if scalars:
        expected = np.array([float(values[c.name]) for c in picked])
    else:
        expected = row_major(picked, values, n)
    assert np.array_equal(gather(collection, block), expected)
