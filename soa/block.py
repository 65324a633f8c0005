"""Block: a named group of columns that the model sees as one tensor; Plan: how it gets there.

A compiler either fixes strides at compile time or ignores them. So an artifact gets a block as
dense arguments, and the compiled graph does the rest:

- `matrix`: the block's physical columns are adjacent in the buffer and have one dtype. They are one
  contiguous `(F, S)` argument; S is the padded column length. The graph narrows S to n, transposes
  the matrix, and reorders its columns if the block's order differs from the buffer's.
- `columns`: all other columns (scattered, of mixed dtype, or separately allocated). They are F
  arguments of shape `(n,)`, stacked and cast in the graph.
- `scalars`: scalar members, F arguments of shape `(1,)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from soa.dtypes import DTYPES
from soa.errors import BlockError, LayoutError
from soa.layout import Column, Layout
from soa.options import find_repeated

PlanKind = Literal["matrix", "columns", "scalars"]


@dataclass(frozen=True)
class Block:
    """Columns of one collection, in the model's order.

    The model sees `(n, F)`, with F the number of components (the entries of an Eigen matrix row by
    row). A block of one Eigen matrix is `(n, r, c)`. `shape` reshapes `(n, F)` to `(n, *shape)`;
    with `()` one component is `(n,)`. A block of scalars is `(F,)`; `broadcast` repeats it in each
    row, `(n, F)`. `dtype` is the dtype that the model gets; it must be given if the columns' dtypes
    differ.
    """

    name: str
    collection: str
    columns: tuple[str, ...]
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    broadcast: bool = False


@dataclass(frozen=True)
class Plan:
    """How a block crosses an artifact's boundary.

    `components` are the physical columns behind the arguments, as (column, component): in buffer
    order for `matrix`, in the model's order otherwise. `order[i]` is the index in `components` of
    the model's feature i. `dtypes` are those of the arguments (one entry for a matrix). `dtype` and
    `feature_shape` (of one row) are those of the tensor that the model gets.
    """

    kind: PlanKind
    components: tuple[tuple[str, int], ...]
    order: tuple[int, ...]
    dtypes: tuple[str, ...]
    dtype: str
    feature_shape: tuple[int, ...]

    @property
    def identity(self) -> bool:
        """True if `components` are in the model's order already."""
        return self.order == tuple(range(len(self.order)))


def plan_block(block: Block, layout: Layout) -> Plan:
    """Choose how a block of a collection with this layout crosses an artifact's boundary.

    Raises BlockError, which names the block and the column, if the layout cannot provide it.
    """
    members = _find_members(block, layout)
    features: list[tuple[str, int]] = []
    dtypes: list[str] = []
    for member in members:
        features += [(member.name, member.component_of(i)) for i in range(member.components)]
        dtypes += [member.dtype] * member.components
    dtype = _model_dtype(block, dtypes)
    feature_shape = _feature_shape(block, [member.shape for member in members], len(features))
    kind: PlanKind = "scalars" if members[0].kind == "scalar" else "columns"
    adjacent = None if kind == "scalars" else _adjacent_columns(layout, features, dtypes)
    if adjacent is not None:
        index_of = {component: i for i, component in enumerate(adjacent)}
        order = tuple(index_of[component] for component in features)
        return Plan("matrix", tuple(adjacent), order, (dtypes[0],), dtype, feature_shape)
    order = tuple(range(len(features)))
    return Plan(kind, tuple(features), order, tuple(dtypes), dtype, feature_shape)


def _find_members(block: Block, layout: Layout) -> list[Column]:
    """Return the columns of a block, which are all scalars or have none among them.

    Raises BlockError if a column is missing, repeated, or of a dtype that no model reads.
    """
    where = f"block {block.name!r}"
    if not block.columns:
        raise BlockError(f"{where} names no columns")
    if twice := find_repeated(block.columns):
        raise BlockError(f"{where} names column {twice[0]!r} twice")
    try:
        members = [layout[name] for name in block.columns]
    except LayoutError as error:
        raise BlockError(f"{where}, collection {block.collection!r}: {error}") from None
    for member in members:
        if member.dtype not in DTYPES:
            raise BlockError(
                f"{where} names {member.name!r}, which is {member.dtype}: a collection "
                f"can hold it, but no model reads it (models read {', '.join(DTYPES)})"
            )
    scalars = [member.name for member in members if member.kind == "scalar"]
    if scalars and len(scalars) < len(members):
        raise BlockError(
            f"{where} mixes scalars ({', '.join(scalars)}) with columns: a scalar has one value "
            "for the collection, so give it a block of its own"
        )
    if block.broadcast and not scalars:
        raise BlockError(f"{where} has broadcast, which is for scalars: remove it")
    return members


def _model_dtype(block: Block, dtypes: list[str]) -> str:
    """Return the dtype that the model gets: that of the block, or else that of its features.

    `dtypes` has the dtype of each feature. Raises BlockError if they differ and the block has none.
    """
    if block.dtype is not None:
        if block.dtype not in DTYPES:
            raise BlockError(
                f"block {block.name!r}: unknown dtype {block.dtype!r}: use one of "
                f"{', '.join(DTYPES)}"
            )
        return block.dtype
    if len(set(dtypes)) > 1:
        raise BlockError(
            f"block {block.name!r} has columns of {', '.join(sorted(set(dtypes)))}: "
            "say which dtype the model takes (dtype:)"
        )
    return dtypes[0]


def _feature_shape(block: Block, shapes: list[tuple[int, ...]], components: int) -> tuple[int, ...]:
    """Return the shape of one row as the model gets it.

    `shapes` has the shape of each column, `components` is how many components all of them have.
    Raises BlockError if the block's own shape does not hold as many.
    """
    if block.shape is not None:
        if math.prod(block.shape) != components or any(extent < 1 for extent in block.shape):
            raise BlockError(
                f"block {block.name!r}: shape {list(block.shape)} does not hold "
                f"its {components} components"
            )
        return block.shape
    if len(shapes) == 1 and len(shapes[0]) == 2:  # one Eigen matrix
        return shapes[0]
    return (components,)


def _adjacent_columns(
    layout: Layout, features: list[tuple[str, int]], dtypes: list[str]
) -> list[tuple[str, int]] | None:
    """Return the physical columns behind the features in the order of the buffer.

    None unless these are adjacent and of one dtype, as a `matrix` needs. No feature is repeated.
    """
    if layout.storage != "buffer" or len(set(dtypes)) > 1:
        return None
    physical = [(member.name, k) for member in layout.columns for k in range(member.components)]
    index_of = {component: i for i, component in enumerate(physical)}
    indices = [index_of[component] for component in features]
    first, last = min(indices), max(indices)
    return physical[first : last + 1] if last - first + 1 == len(indices) else None
