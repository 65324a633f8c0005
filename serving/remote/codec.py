"""An artifact's arguments as the arrays of a request to one server, and its answer as outputs.

Servers of one bundle may take requests in different forms: what is answered of a request is kept
with the codec of the server that answered, and all of it is written at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from serving.arrays import Arrays
from serving.wire import Form, Wire, locations
from soa.signature import Signature

_ALIGNMENT = 64  # of each array in shared memory


class Codec:
    """The tensors that a server takes and gives, for arguments in memory that `arrays` views.

    `merge`: rows are independent, so that more of them than a message carries go in several.
    """

    def __init__(
        self, signature: Signature, form: Form, merge: bool, arrays: Arrays | None = None
    ) -> None:
        """Raises ServingError for a signature that does not travel in that form."""
        self.form, self.merge = form, merge
        self.wire = Wire.of(signature, form)
        self.tensors = (*self.wire.inputs, *self.wire.outputs)
        self.outputs = {t.name: t for t in self.wire.outputs}
        self._arrays = arrays or Arrays()
        self._columns = {
            **locations(signature, self.wire.inputs, "input"),
            **locations(signature, self.wire.outputs, "output"),
        }
        self._least = max(1, *(limits.min for limits in signature.ranges.values()))

    def encode(
        self, arguments: Sequence[torch.Tensor], at: int, rows: Mapping[str, int]
    ) -> dict[str, Any]:
        """The inputs of so many rows from row `at` on; views where the memory allows it."""
        memory = self._arrays.of(arguments)
        return {
            t.name: t.gather(self._columns[t.name].parts(memory), at, rows[t.rows])
            for t in self.wire.inputs
        }

    def decode(self, arguments: Sequence[torch.Tensor], at: int, found: Mapping[str, Any]) -> None:
        memory = self._arrays.of(arguments)
        for t in self.wire.outputs:
            t.scatter(self._columns[t.name].parts(memory), at, found[t.name])
        self._arrays.wait()

    def fitting(self, left: Mapping[str, int], room: int) -> Mapping[str, int] | None:
        """The rows of the next message, whose arrays may have `room` bytes: `left` if all fit.

        Else the rows are spread evenly over messages; None where they cannot be split so far.
        """
        largest = self.nbytes(left)
        if largest <= room:
            return left
        if not self.merge:
            return None
        ((dim, n),) = left.items()
        most = room // (largest // n)  # without scalars, bytes go by rows
        messages = -(-n // most) if most else n + 1
        return {dim: -(-n // messages)} if n // messages >= self._least else None

    def nbytes(self, rows: Mapping[str, int]) -> int:
        """Of the arrays of a request, or of its answer if that is more."""
        sides = (self.wire.inputs, self.wire.outputs)
        return max(sum(t.nbytes(rows[t.rows]) for t in tensors) for tensors in sides)

    def in_region(self, rows: Mapping[str, int]) -> tuple[dict[str, slice], int]:
        """Where each array of a request and its answer lies in one region of shared memory, and the
        region's size, in bytes."""
        found: dict[str, slice] = {}
        size = 0
        for t in self.tensors:
            found[t.name] = slice(size, size + t.nbytes(rows[t.rows]))
            size += -(-t.nbytes(rows[t.rows]) // _ALIGNMENT) * _ALIGNMENT
        return found, size


class Progress:
    """A request on its way: its first `at` rows are answered, and nobody has seen the answers yet.

    `at` is 0 where rows belong together: they are answered all at once. One thread.
    """

    def __init__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.arguments = arguments
        self.at = 0
        self.done = False
        self._answers: list[tuple[Codec, int, Mapping[str, Any]]] = []

    def left(self, dims: Sequence[str]) -> dict[str, int]:
        """Rows without an answer, by dimension: the first arguments carry the row counts."""
        return {dim: self.arguments[i].shape[0] - self.at for i, dim in enumerate(dims)}

    def take(self, codec: Codec, rows: int | None, found: Mapping[str, Any]) -> None:
        """The answer to the next `rows`, or to all that were left (None)."""
        self._answers.append((codec, self.at, found))
        self.at += rows or 0
        self.done = rows is None

    def drop(self) -> None:
        """Somebody has run the whole request, and written it."""
        self._answers.clear()
        self.done = True

    def write(self) -> None:
        """All answers into the outputs: the last act of a request."""
        for codec, at, found in self._answers:
            codec.decode(self.arguments, at, found)
