"""Random layouts, blocks and row counts around an affine model, for hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from soa import Block, Column, Layout, RowRange, Signature
from soa.dtypes import DTYPES
from soa.layout import Storage
from stages.reference.answers import Arrays, row_major_inputs
from tests.models.mlps import Affine
from tests.soa.strategies import ROWS, layouts, values_of

MAX_ROWS = 100
_STORAGES: tuple[Storage, ...] = ("buffer", "columns")


@dataclass(frozen=True)
class Problem:
    """A model, its signature, inputs that every dtype holds exactly, and row counts."""

    model: Affine
    signature: Signature
    inputs: Arrays
    n: int
    spare: int

    def expected(self) -> list[torch.Tensor]:
        """The model's answers on ordinary row-major tensors."""
        arguments = row_major_inputs(self.signature, self.inputs, {"n": self.n})
        return list(self.model(*arguments))


@st.composite
def problems(draw: st.DrawFn, one_dtype: bool = False) -> Problem:
    """One to three input blocks of one or two collections, and one or two output blocks.

    With `one_dtype`, all columns of a collection have one dtype, which NumPy also has.
    """
    dtypes = [(d,) for d in DTYPES if d != "bfloat16"] if one_dtype else [DTYPES]
    read = {
        f"in{i}": draw(layouts(draw(st.sampled_from(dtypes)), _STORAGES).filter(_has_columns))
        for i in range(draw(st.integers(1, 2)))
    }
    inputs = [_block(draw, f"x{i}", name, layout) for i, (name, layout) in enumerate(read.items())]
    if draw(st.booleans()):
        inputs.append(_block(draw, "again", "in0", read["in0"], scalars=draw(st.booleans())))
    floats = [("float32",), ("float64",)] if one_dtype else [("float32", "float64")]
    written = draw(layouts(draw(st.sampled_from(floats)), _STORAGES).filter(_has_columns))
    names = draw(st.permutations([c.name for c in written.columns if c.kind != "scalar"]))
    halves = [tuple(names[: len(names) // 2]), tuple(names[len(names) // 2 :])]
    outputs = [
        Block(f"y{i}", "out", half, "float32", _shape(draw, written, half))
        for i, half in enumerate(halves)
        if half
    ]
    signature = Signature.build(
        {**read, "out": written}, inputs, outputs, {"n": RowRange(0, MAX_ROWS)}
    )
    seed = draw(st.integers(0, 1000))
    arrays = {
        name: values_of(layout, MAX_ROWS, seed + i)
        for i, (name, layout) in enumerate(read.items())
        if name in signature.input_collections
    }
    model = Affine(
        [b.plan.feature_shape for b in signature.inputs],
        [b.plan.feature_shape for b in signature.outputs],
        [b.rowless for b in signature.inputs],
    )
    return Problem(model, signature, arrays, draw(ROWS), draw(st.sampled_from([0, 0, 1, 40])))


def _has_columns(layout: Layout) -> bool:
    """Whether it has more than scalars."""
    return any(c.kind != "scalar" for c in layout.columns)


def _block(
    draw: st.DrawFn, name: str, collection: str, layout: Layout, scalars: bool = False
) -> Block:
    """A block of some columns, in any order; of scalars, if they are wanted and there are any."""
    members = [c.name for c in layout.columns if (c.kind == "scalar") == scalars]
    if not members:
        members = [c.name for c in layout.columns if c.kind != "scalar"]
    order = draw(st.permutations(members))
    columns = tuple(order[: draw(st.integers(1, len(order)))])
    broadcast = layout[columns[0]].kind == "scalar" and draw(st.booleans())
    shape = _shape(draw, layout, columns)
    return Block(name, collection, columns, "float32", shape, broadcast)


def _shape(draw: st.DrawFn, layout: Layout, columns: tuple[str, ...]) -> tuple[int, ...] | None:
    """Sometimes a shape of two extents that hold all components."""
    members: list[Column] = [layout[name] for name in columns]
    count = sum(member.components for member in members)
    if draw(st.booleans()):
        return None
    first = draw(st.sampled_from([k for k in range(1, count + 1) if count % k == 0]))
    return (first, count // first)
