"""What a session says to one server and hears from it, and how far a request has come.

Servers of one bundle may take requests in different forms: what is answered of a request is kept
with the form that the answer came in, and all of it is written at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from serving.wire import Array, Form, Location, Wire, WireTensor, locations
from soa.signature import Signature

_ALIGNMENT = 64  # of each array in shared memory


@dataclass(frozen=True)
class Exchange:
    """The tensors that a server takes and gives, and where an artifact's arguments hold them.

    `merge`: rows are independent, so that more of them than a message carries go in several.
    """

    form: Form
    merge: bool
    wire: Wire
    given: Mapping[str, Location]
    written: Mapping[str, Location]
    least: int
    """Rows that a message of several must have at least."""

    @classmethod
    def of(cls, signature: Signature, form: Form, merge: bool) -> Exchange:
        """Raises ServingError for a signature that does not travel in that form."""
        wire = Wire.of(signature, form)
        given = locations(signature, wire.inputs, "input")
        written = locations(signature, wire.outputs, "output")
        least = max(1, *(limits.min for limits in signature.ranges.values()))
        return cls(form, merge, wire, given, written, least)

    @cached_property
    def tensors(self) -> tuple[WireTensor, ...]:
        return (*self.wire.inputs, *self.wire.outputs)

    @cached_property
    def outputs(self) -> Mapping[str, WireTensor]:
        return {t.name: t for t in self.wire.outputs}

    def gather(
        self, arguments: Sequence[torch.Tensor], at: int, rows: Mapping[str, int]
    ) -> dict[str, Array]:
        """The inputs of so many rows from row `at` on; views where the memory allows it."""
        return {
            t.name: t.gather(self.given[t.name].parts(arguments), at, rows[t.rows])
            for t in self.wire.inputs
        }

    def scatter(
        self, arguments: Sequence[torch.Tensor], at: int, found: Mapping[str, Array]
    ) -> None:
        for t in self.wire.outputs:
            t.scatter(self.written[t.name].parts(arguments), at, found[t.name])

    def fitting(self, left: Mapping[str, int], room: int) -> Mapping[str, int] | None:
        """The rows of the next message, whose arrays may have `room` bytes: `left` if all fit.

        Of several messages each gets as many. None where the rows cannot be taken apart so far.
        """
        largest = self.nbytes(left)
        if largest <= room:
            return left
        if not self.merge:
            return None
        ((dim, n),) = left.items()
        most = room // (largest // n)  # without scalars, bytes go by rows
        messages = -(-n // most) if most else n + 1
        return {dim: -(-n // messages)} if n // messages >= self.least else None

    def places(self, rows: Mapping[str, int]) -> Places:
        """Where the arrays of a request and its answer lie in one region of shared memory."""
        found: dict[str, slice] = {}
        size = 0
        for t in self.tensors:
            found[t.name] = slice(size, size + t.nbytes(rows[t.rows]))
            size += -(-t.nbytes(rows[t.rows]) // _ALIGNMENT) * _ALIGNMENT
        return Places(found, size)

    def nbytes(self, rows: Mapping[str, int]) -> int:
        """Of the arrays of a request, or of its answer if that is more."""
        sides = (self.wire.inputs, self.wire.outputs)
        return max(sum(t.nbytes(rows[t.rows]) for t in tensors) for tensors in sides)


@dataclass(frozen=True)
class Places:
    """The bytes `of` each tensor in a region of `size` bytes."""

    of: Mapping[str, slice]
    size: int

    def name_in(self, request: Any, region: str) -> None:
        """Tell Triton that the arrays of a request are there, and the answer is to go there."""
        for described in (*request.inputs, *request.outputs):
            where = self.of[described.name]
            described.parameters["shared_memory_region"].string_param = region
            described.parameters["shared_memory_offset"].int64_param = where.start
            described.parameters["shared_memory_byte_size"].int64_param = where.stop - where.start


class Progress:
    """A request on its way: its first `at` rows are answered, and nobody has seen the answers yet.

    `at` is 0 where rows belong together: they are answered all at once. One thread.
    """

    def __init__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.arguments = arguments
        self.at = 0
        self.done = False
        self._answers: list[tuple[Exchange, int, Mapping[str, Array]]] = []

    def left(self, dims: Sequence[str]) -> dict[str, int]:
        """Rows without an answer, by dimension: the first arguments carry the row counts."""
        return {dim: self.arguments[i].shape[0] - self.at for i, dim in enumerate(dims)}

    def take(self, exchange: Exchange, rows: int | None, found: Mapping[str, Array]) -> None:
        """The answer to the next `rows`, or to all that were left (None)."""
        self._answers.append((exchange, self.at, found))
        self.at += rows or 0
        self.done = rows is None

    def drop(self) -> None:
        """Somebody has run the whole request, and written it."""
        self._answers.clear()
        self.done = True

    def write(self) -> None:
        """All answers into the outputs: the last act of a request."""
        for exchange, at, found in self._answers:
            exchange.scatter(self.arguments, at, found)
