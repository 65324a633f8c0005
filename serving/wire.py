"""What crosses the wire: one tensor per column, rows first.

A column of n rows travels as `(n, 1)`, an Eigen column as `(n, r)` or `(n, r, c)`, a scalar as
`(1,)`; each is named `collection.column`. A plain column is its own memory, byte for byte. Only
columns that a block of the model reads or writes travel. Client and server both follow this file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from serving.errors import ServingError
from soa.collection import Collection
from soa.dtypes import numpy_dtype
from soa.layout import Column
from soa.signature import BoundBlock, Signature

Array = np.ndarray[Any, Any]
Parts = Array | Sequence[Array]
"""The physical columns of a member, by component: the rows of a matrix, or separate arrays."""

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
"""Our dtypes by Triton's names. bfloat16 is left out: NumPy, on which this is built, has none."""


@dataclass(frozen=True)
class WireTensor:
    """A column as a request or an answer carries it. `rows` is its row dimension."""

    collection: str
    column: Column
    rows: str

    @cached_property
    def name(self) -> str:
        return f"{self.collection}.{self.column.name}"

    @property
    def scalar(self) -> bool:
        return self.column.kind == "scalar"

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.column.shape or (1,)

    def shape(self, n: int) -> tuple[int, ...]:
        return self.dims if self.scalar else (n, *self.dims)

    @property
    def datatype(self) -> str:
        return TRITON_DTYPES[self.column.dtype]

    @cached_property
    def dtype(self) -> np.dtype[np.generic]:
        return numpy_dtype(self.column.dtype)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The physical column of each entry of a row."""
        return tuple(self.column.component_of(i) for i in range(self.column.components))

    def nbytes(self, n: int) -> int:
        return math.prod(self.shape(n)) * self.dtype.itemsize

    def gather(self, parts: Parts, at: int, n: int) -> Array:
        """Rows `at` … `at + n` in the wire's shape: a view where the memory allows it."""
        if self.scalar:
            return parts[0][:1]
        if len(self.order) == 1:
            return parts[0][at : at + n].reshape(n, *self.dims)
        if isinstance(parts, np.ndarray):
            return self._rows(parts)[:, at : at + n].T.reshape(n, *self.dims)
        return np.stack([parts[k][at : at + n] for k in self.order], axis=1).reshape(n, *self.dims)

    def scatter(self, parts: Parts, at: int, values: Array) -> None:
        """Write values of the wire's shape into the physical columns, from row `at` on."""
        if self.scalar:
            parts[0][:1] = values
            return
        n = len(values)
        flat = values.reshape(n, len(self.order))
        for i, k in enumerate(self.order):
            parts[k][at : at + n] = flat[:, i]

    def _rows(self, parts: Array) -> Array:
        identity = self.order == tuple(range(len(self.order)))
        return parts if identity else parts[list(self.order)]


@dataclass(frozen=True)
class Wire:
    """The tensors of a request and of an answer, in order. Raises ServingError from `of`."""

    inputs: tuple[WireTensor, ...]
    outputs: tuple[WireTensor, ...]

    @classmethod
    def of(cls, signature: Signature) -> Wire:
        """Of a signature; raises ServingError for a dtype that does not travel."""
        return cls(_tensors(signature, signature.inputs), _tensors(signature, signature.outputs))


def _tensors(signature: Signature, blocks: Sequence[BoundBlock]) -> tuple[WireTensor, ...]:
    found: dict[tuple[str, str], WireTensor] = {}
    for bound in blocks:
        where = bound.block.collection
        for name in bound.block.columns:
            column = signature.layouts[where][name]
            if column.dtype not in TRITON_DTYPES:
                raise ServingError(
                    f"column {where}.{name} is {column.dtype}, which does not travel: serve a "
                    "version whose column is float32"
                )
            found.setdefault((where, name), WireTensor(where, column, bound.rows))
    return tuple(found.values())


def mergeable(signature: Signature) -> bool:
    """Whether rows of several requests can share a run at all: one row dimension, no scalars.

    Whether that leaves the answers as they are is another question: see serving/independence.py.
    """
    columns = [t.column.kind for each in _both(Wire.of(signature)) for t in each]
    return len(signature.dims) == 1 and "scalar" not in columns


def _both(wire: Wire) -> tuple[tuple[WireTensor, ...], tuple[WireTensor, ...]]:
    return wire.inputs, wire.outputs


def collection_parts(collection: Collection, column: Column) -> Parts:
    """The physical columns of a member of a CPU collection, as NumPy views."""
    if collection.buffer is not None and column.kind == "eigen":
        matrix: Array = collection.matrix(column.name, 0, column.components).numpy()
        return matrix
    return [collection.component(column.name, k).numpy() for k in range(column.components)]


@dataclass(frozen=True)
class Location:
    """Where the physical columns of a member are among an artifact's arguments.

    `places` has (argument, row of its matrix or None) for each component.
    """

    places: tuple[tuple[int, int | None], ...]

    @cached_property
    def _run(self) -> tuple[int, slice] | None:
        """(argument, rows) where the columns are adjacent rows of one matrix."""
        index, first = self.places[0]
        if first is None:
            return None
        run = tuple((index, first + i) for i in range(len(self.places)))
        return (index, slice(first, first + len(run))) if run == self.places else None

    def parts(self, arguments: Sequence[torch.Tensor]) -> Parts:
        """The physical columns as NumPy views of the arguments' memory."""
        if self._run is not None:
            index, rows = self._run
            matrix: Array = arguments[index].numpy()[rows]
            return matrix
        return [
            arguments[i].numpy() if row is None else arguments[i].numpy()[row]
            for i, row in self.places
        ]


def locations(
    signature: Signature, tensors: Sequence[WireTensor], role: str
) -> dict[str, Location]:
    """For each tensor, by name, where an artifact's arguments of that role hold its column."""
    place: dict[tuple[str, str, int], tuple[int, int | None]] = {}
    plans = {bound.name: bound.plan for bound in (*signature.inputs, *signature.outputs)}
    for index, argument in enumerate(signature.arguments):
        if argument.role != role:
            continue
        if argument.kind == "matrix":
            for row, (name, k) in enumerate(plans[argument.block].components):
                place.setdefault((argument.collection, name, k), (index, row))
        else:
            key = (argument.collection, argument.column, argument.component)
            place.setdefault(key, (index, None))
    return {
        t.name: Location(
            tuple(place[t.collection, t.column.name, k] for k in range(t.column.components))
        )
        for t in tensors
    }
