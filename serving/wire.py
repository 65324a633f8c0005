"""The tensors of requests and answers, in one of three forms. Client and server share this file.

- `columns`: one tensor for each column, named `collection.column`. Its shape is `(n, 1)`, for an
  Eigen column `(n, r)` or `(n, r, c)`, for a scalar `(1,)`. A plain column is sent without a copy.
- `rows`: one tensor for each block, with the block's name: the model's row-major `(n, F)` or
  `(n, *shape)`, in the dtype of the block's columns.
- `blocks`: one tensor `(F, n)` for each block, with the block's name: the first n rows of the
  block's physical columns, in the order of the buffer.

A block of scalars has the shape `(F,)`. Only columns that a block of the model reads or writes are
sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch

from serving.errors import ServingError
from soa.dtypes import numpy_dtype
from soa.signature import BoundBlock, Signature

Array = np.ndarray[Any, Any]
Program = Callable[[Sequence[Array]], Sequence[Array]]
"""Runs a model: takes the arrays of a request in order, returns the arrays of the answer."""
Parts = Any
"""The physical columns of a tensor, in order: one matrix with all of them, or a list of arrays.
These are NumPy arrays or torch tensors, which share the operations that are used here."""

TRITON_DTYPES = {
    "bool": "BOOL",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
"""Triton's names of our dtypes. bfloat16 is left out, because NumPy does not have it."""


PhysicalColumn = tuple[str, str, int]
"""A collection, a column of it, and a component of the column."""


def library_of(values: Any) -> Any:
    """Return the library of an array or tensor: the module numpy or torch."""
    return torch if isinstance(values, torch.Tensor) else np


Form = Literal["columns", "rows", "blocks"]
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True)
class WireTensor:
    """A tensor of a request or an answer, and the physical columns that it holds.

    `components`: these columns as (column, component), in the buffer's order if they are adjacent
    there. `order`: for each entry of a row, its index in `components`. `dims`: the shape of a row.
    `rows`: the name of the row dimension. `rows_last`: True if the tensor is `(F, n)`.
    """

    name: str
    collection: str
    components: tuple[tuple[str, int], ...]
    order: tuple[int, ...]
    dims: tuple[int, ...]
    column_dtype: str
    rows: str
    scalar: bool = False
    rows_last: bool = False

    def shape(self, n: int) -> tuple[int, ...]:
        """Return the tensor's shape for `n` rows. A scalar has the same shape for every `n`."""
        if self.scalar:
            return self.dims
        return (*self.dims, n) if self.rows_last else (n, *self.dims)

    def rows_in(self, shape: Sequence[int]) -> int:
        """Return the row count in a tensor's shape: 0 for (). Other extents are not checked."""
        return shape[-1 if self.rows_last else 0] if shape else 0

    @property
    def described(self) -> str:
        """The shape as text, with the name of the row dimension."""
        extents = [self.rows if extent < 0 else str(extent) for extent in self.shape(-1)]
        return f"({extents[0]},)" if len(extents) == 1 else f"({', '.join(extents)})"

    @property
    def datatype(self) -> str:
        """Triton's name of the dtype."""
        return TRITON_DTYPES[self.column_dtype]

    @cached_property
    def dtype(self) -> np.dtype[np.generic]:
        """NumPy's dtype of the tensor."""
        return numpy_dtype(self.column_dtype)

    def nbytes(self, n: int) -> int:
        """Return the bytes of the tensor for `n` rows."""
        return math.prod(self.shape(n)) * self.dtype.itemsize

    @cached_property
    def entries(self) -> list[PhysicalColumn]:
        """The physical column of each entry of a row."""
        return [(self.collection, *self.components[index]) for index in self.order]

    @cached_property
    def in_order(self) -> bool:
        """Whether a row has its entries in the order of `components`."""
        return self.order == tuple(range(len(self.order)))

    def window(self, parts: Parts, at: int, n: int) -> Any:
        """Return `n` rows from row `at` on in the wire's shape, as a view of the columns `parts`.

        None for a scalar, or if the columns are not in this order in memory.
        """
        # Each `reshape` here splits one extent, which never copies.
        if self.scalar:
            return None
        if len(self.order) == 1:
            return parts[0][at : at + n].reshape(self.shape(n))
        if self.in_order and not isinstance(parts, list):
            rows = parts[:, at : at + n]
            return rows if self.rows_last else rows.T.reshape(self.shape(n))
        return None

    def gather(self, parts: Parts, at: int, n: int) -> Any:
        """Return `n` rows from row `at` on in the wire's shape: the view of `window`, else a copy.

        `parts`: the physical columns. For a scalar, `at` and `n` are ignored.
        """
        library = library_of(parts[0])
        if self.scalar:
            values = library.concatenate([parts[index][:1] for index in self.order])
            return values.reshape(self.dims)
        if (view := self.window(parts, at, n)) is not None:
            return view
        by_entry = library.stack([parts[index][at : at + n] for index in self.order])
        return by_entry if self.rows_last else by_entry.T.reshape(self.shape(n))

    def scatter(self, parts: Parts, at: int, values: Any) -> None:
        """Write `values`, of the wire's shape, into the columns `parts` from row `at` on."""
        n = 1 if self.scalar else self.rows_in(values.shape)
        if (view := self.window(parts, at, n)) is not None:
            view[...] = values
            return
        by_entry = values if self.rows_last else values.reshape(n, len(self.order)).T
        for i, index in enumerate(self.order):
            parts[index][at : at + n] = by_entry[i]


@dataclass(frozen=True)
class Wire:
    """The tensors of a request and of an answer, in order."""

    inputs: tuple[WireTensor, ...]
    outputs: tuple[WireTensor, ...]

    @classmethod
    def of(cls, signature: Signature, form: Form = "columns") -> Wire:
        """Return the wire of a signature. Raises ServingError if a block cannot have this form."""

        def tensors(blocks: Sequence[BoundBlock]) -> tuple[WireTensor, ...]:
            """Return the tensors for the blocks of the inputs, or of the outputs."""
            if form == "columns":
                return _column_tensors(signature, blocks)
            return tuple(_block_tensor(signature, bound, blocks, form) for bound in blocks)

        return cls(tensors(signature.inputs), tensors(signature.outputs))


def _column_tensors(signature: Signature, blocks: Sequence[BoundBlock]) -> tuple[WireTensor, ...]:
    """Make a tensor for each column of the blocks. A column of several blocks has only one."""
    tensors: dict[tuple[str, str], WireTensor] = {}
    for bound in blocks:
        collection = bound.block.collection
        for name in bound.block.columns:
            column = signature.layouts[collection][name]
            _require_sendable(collection, name, column.dtype)
            tensor = WireTensor(
                f"{collection}.{name}",
                collection,
                components=tuple((name, i) for i in range(column.components)),
                order=tuple(column.component_of(i) for i in range(column.components)),
                dims=column.shape or (1,),
                column_dtype=column.dtype,
                rows=bound.rows,
                scalar=column.kind == "scalar",
            )
            tensors.setdefault((collection, name), tensor)
    return tuple(tensors.values())


def _block_tensor(
    signature: Signature, bound: BoundBlock, blocks: Sequence[BoundBlock], form: Form
) -> WireTensor:
    """Make the tensor of a block. `form`: "rows" or "blocks".

    `blocks`: all blocks of its side. Raises ServingError if one tensor cannot hold the block, or if
    another one of `blocks` has one of its columns.
    """
    collection, plan = bound.block.collection, bound.plan
    dtypes = sorted({signature.layouts[collection][name].dtype for name in bound.block.columns})
    if len(dtypes) > 1:
        raise ServingError(
            f"block {bound.name!r} has columns of {', '.join(dtypes)}, which one tensor cannot "
            "hold: serve it with --requests columns"
        )
    _require_sendable(collection, bound.block.columns[0], dtypes[0])
    _require_once(bound, blocks)
    in_memory = form == "blocks"
    count = len(plan.components)
    scalar = plan.kind == "scalars"
    return WireTensor(
        bound.name,
        collection,
        components=plan.components,
        order=tuple(range(count)) if in_memory else plan.order,
        dims=(count,) if in_memory else plan.feature_shape,
        column_dtype=dtypes[0],
        rows=bound.rows,
        scalar=scalar,
        rows_last=in_memory and not scalar,
    )


def _require_once(bound: BoundBlock, blocks: Sequence[BoundBlock]) -> None:
    """Raise ServingError if another block shares a column with `bound`: it would be sent twice."""
    collection = bound.block.collection
    for other in blocks:
        if other is bound or other.block.collection != collection:
            continue
        if shared := [name for name in bound.block.columns if name in other.block.columns]:
            raise ServingError(
                f"column {collection}.{shared[0]} is in the blocks {bound.name!r} and "
                f"{other.name!r}, and would be sent twice: serve it with --requests columns"
            )


def _require_sendable(collection: str, column: str, dtype: str) -> None:
    """Raise ServingError if Triton has no dtype for a column."""
    if dtype not in TRITON_DTYPES:
        raise ServingError(
            f"column {collection}.{column} is {dtype}, which cannot be sent: serve a version "
            "whose column is float32"
        )


def mergeable(signature: Signature) -> bool:
    """Whether one run can have rows of several requests: one row dimension, and no scalars.

    stages/capture/independence.py tests whether the answers stay the same.
    """
    blocks = (*signature.inputs, *signature.outputs)
    return len(signature.dims) == 1 and all(bound.plan.kind != "scalars" for bound in blocks)


ArgumentPlace = tuple[int, int | None]
"""The index of an artifact's argument, and a row of it; None if the argument is one column."""


@dataclass(frozen=True)
class Location:
    """Where the physical columns of a tensor are among an artifact's arguments.

    `places`: one for each of the tensor's `components`, in their order.
    """

    places: tuple[ArgumentPlace, ...]

    @cached_property
    def _adjacent(self) -> tuple[int, slice] | None:
        """The index of the matrix, and its rows, if the columns are adjacent rows of one matrix.

        Else None.
        """
        index, row = self.places[0]  # of the first column
        if row is None:
            return None
        adjacent = tuple((index, row + i) for i in range(len(self.places)))
        return (index, slice(row, row + len(adjacent))) if adjacent == self.places else None

    def parts(self, arguments: Sequence[Any]) -> Parts:
        """Return the physical columns as views of `arguments`, which are arrays or tensors."""
        if self._adjacent is not None:
            index, rows = self._adjacent
            return arguments[index][rows]
        return [arguments[i] if row is None else arguments[i][row] for i, row in self.places]


def argument_columns(signature: Signature) -> list[list[PhysicalColumn]]:
    """Return the physical columns in each argument of an artifact, in order.

    A row carrier has none: only its shape counts, which says how many rows there are.
    """
    plans = {bound.name: bound.plan for bound in (*signature.inputs, *signature.outputs)}
    columns = []
    for argument in signature.arguments:
        components = [(argument.column, argument.component)]
        if argument.kind == "matrix":
            components = list(plans[argument.block].components)
        elif argument.kind == "carrier":
            components = []
        columns.append([(argument.collection, name, component) for name, component in components])
    return columns


def locate_columns(
    signature: Signature, tensors: Sequence[WireTensor], role: str
) -> dict[str, Location]:
    """Find the columns of tensors in an artifact's arguments; returns locations by tensor name.

    `role`: look only in arguments of this role, "input" or "output". If several of them have a
    column, the first one counts.
    """
    places: dict[PhysicalColumn, ArgumentPlace] = {}
    by_argument = argument_columns(signature)
    for index, (argument, columns) in enumerate(zip(signature.arguments, by_argument, strict=True)):
        if argument.role == role:
            for row, column in enumerate(columns):
                places.setdefault(column, (index, row if argument.kind == "matrix" else None))
    return {
        tensor.name: Location(
            tuple(places[tensor.collection, *component] for component in tensor.components)
        )
        for tensor in tensors
    }
