"""Convert an artifact's arguments into the arrays of a request, and an answer into outputs.

Servers of the same bundle may take requests in different forms. So an answer is kept together with
the codec of the server that sent it; all answers are written at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from serving.wire import Form, Wire, locate_columns
from soa.signature import Signature

_ALIGNMENT = 64  # of each array in shared memory, in bytes


class Codec:
    """Converts between the artifact's arguments and the tensors of one server.

    `form`: the form of the server's requests. `merge`: rows are independent of each other, so rows
    that do not fit into one message are sent in several. Raises ServingError for a signature that
    cannot be sent in this form.
    """

    def __init__(self, signature: Signature, form: Form, merge: bool) -> None:
        """Find where the columns of each tensor are among the arguments."""
        self.form, self.merge = form, merge
        self.wire = Wire.of(signature, form)
        self.tensors = (*self.wire.inputs, *self.wire.outputs)
        self.outputs = {tensor.name: tensor for tensor in self.wire.outputs}
        self._columns = {
            **locate_columns(signature, self.wire.inputs, "input"),
            **locate_columns(signature, self.wire.outputs, "output"),
        }
        self._least = max(1, *(limits.min for limits in signature.ranges.values()))

    def encode(
        self, arguments: Sequence[torch.Tensor], at: int, rows: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return the input arrays of a message by tensor name, as views of `arguments` if possible.

        `arguments`: CPU tensors. `at`: the first row. `rows`: how many, by dimension.
        """
        memory = [argument.numpy() for argument in arguments]
        inputs = {}
        for tensor in self.wire.inputs:
            columns = self._columns[tensor.name].parts(memory)
            inputs[tensor.name] = tensor.gather(columns, at, rows[tensor.rows])
        return inputs

    def decode(
        self, arguments: Sequence[torch.Tensor], at: int, answers: Mapping[str, Any]
    ) -> None:
        """Write answers, by tensor name, into the output arguments, from row `at` on."""
        memory = [argument.numpy() for argument in arguments]
        for tensor in self.wire.outputs:
            tensor.scatter(self._columns[tensor.name].parts(memory), at, answers[tensor.name])

    def rows_that_fit(self, left: Mapping[str, int], room: int) -> Mapping[str, int] | None:
        """Return the row counts of the next message, whose arrays may have `room` bytes.

        They are `left`, those of all rows without an answer, if these fit. Else these rows are
        spread evenly over several messages. None if they must not be split, or if the parts would
        have too few rows for the model.
        """
        needed = self.nbytes(left)
        if needed <= room:
            return left
        if not self.merge:
            return None
        ((dim, n),) = left.items()  # mergeable models have one dimension and no scalars
        limit = room // (needed // n)  # rows of a message: the bytes are proportional to the rows
        if limit == 0:
            return None
        messages = -(-n // limit)  # rounded up
        if n // messages < self._least:  # the smallest message would be too small
            return None
        return {dim: -(-n // messages)}

    def nbytes(self, rows: Mapping[str, int]) -> int:
        """Return the bytes of the arrays of a request, or of its answer if that is larger."""
        request = sum(tensor.nbytes(rows[tensor.rows]) for tensor in self.wire.inputs)
        answer = sum(tensor.nbytes(rows[tensor.rows]) for tensor in self.wire.outputs)
        return max(request, answer)

    def lay_out_region(self, rows: Mapping[str, int]) -> tuple[dict[str, slice], int]:
        """Place the arrays of a request and of its answer in one region of shared memory.

        Returns by tensor name which bytes of the region its array has, and the size of the region.
        The region itself is page-aligned.
        """
        slices: dict[str, slice] = {}
        size = 0
        for tensor in self.tensors:
            nbytes = tensor.nbytes(rows[tensor.rows])
            slices[tensor.name] = slice(size, size + nbytes)
            size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT  # rounded up
        return slices, size


class Progress:
    """A request in progress: its first `at` rows are answered, but the answers are not written yet.

    `at` stays 0 if rows depend on each other: then one message has them all. For one thread only.
    """

    def __init__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.arguments = arguments
        self.at = 0
        self.done = False
        self._answers: list[tuple[Codec, int, Mapping[str, Any]]] = []

    def rows_left(self, dims: Sequence[str]) -> dict[str, int]:
        """Return the number of rows without an answer, by dimension.

        The shapes of the first arguments, the row carriers, give the number of all rows.
        """
        return {dim: self.arguments[i].shape[0] - self.at for i, dim in enumerate(dims)}

    def add(self, codec: Codec, rows: int | None, answers: Mapping[str, Any]) -> None:
        """Keep the answer to the next `rows` rows; it has the form of `codec`.

        `rows`: None if the answer is for all rows that were left, so that the request is done.
        """
        self._answers.append((codec, self.at, answers))
        self.at += rows or 0
        self.done = rows is None

    def discard_answers(self) -> None:
        """Forget the answers, because a local device has run the whole request and written it."""
        self._answers.clear()
        self.done = True

    def write(self) -> None:
        """Write all answers into the output arguments. This is the last step of a request."""
        for codec, at, answers in self._answers:
            codec.decode(self.arguments, at, answers)
