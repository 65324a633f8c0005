"""The calling convention as a torch module: dense arguments in, the model, outputs in place.

This module is exported, scripted and compiled. Narrowing, transposing, stacking, casting and the
store into the caller's columns are all inside the graph, where a compiler fuses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from soa.block import Plan
from soa.dtypes import torch_dtype
from soa.signature import BoundBlock, Signature, offsets_of
from soa.text import to_identifier
from stages.errors import CaptureError
from stages.model.fronts import begin_and_end, wrong_offsets


class _Unanswered(NamedTuple):
    """The rows of the dimension `dim` that get no answer, since their offsets are wrong. `where` is
    true for these rows, (n,)."""

    dim: str
    where: torch.Tensor


class SoaProgram(torch.nn.Module):
    """A model in the calling convention. `forward` takes the arguments of a signature, in its
    order, writes the outputs into the last of them, and returns nothing."""

    def __init__(
        self,
        model: torch.nn.Module,
        signature: Signature,
        stacked: frozenset[int] = frozenset(),
    ) -> None:
        """`stacked` are the indices of input blocks whose columns come as one tensor (n, columns).

        If the model's order of columns is not that of a matrix, the buffer `order_<i>` holds the
        permutation for block i. The input blocks are counted first, then the output blocks.
        """
        super().__init__()
        self.stacked = stacked
        self.training = False  # not by eval(): an exported model refuses a second call of it
        self.model = model
        self.signature = signature
        for i, bound in enumerate((*signature.inputs, *signature.outputs)):
            if bound.plan.kind == "matrix" and not bound.plan.identity and not _is_eigen(bound):
                order = torch.tensor(bound.plan.order)
                if i >= len(signature.inputs):  # an output is written in the buffer's order
                    order = torch.argsort(order)
                self.register_buffer(f"order_{i}", order)

    def forward(self, *arguments: torch.Tensor) -> tuple[()]:
        """Read the inputs, run the model, and write its outputs into the last arguments. The first
        arguments, one for each dimension, only tell its number of rows."""
        signature = self.signature
        rows = {dim: arguments[i].shape[0] for i, dim in enumerate(signature.dims)}
        first = len(signature.dims)  # the first argument of the next block
        inputs: list[torch.Tensor] = []
        for i, bound in enumerate(signature.inputs):
            end = first + (1 if i in self.stacked else _argument_count(bound.plan))
            inputs.append(self._read(i, bound, arguments[first:end], rows[bound.rows]))
            first = end
        outputs = outputs_in_order(self.model(*inputs), signature)
        unanswered = self._find_unanswered(inputs, rows)
        blocks = zip(signature.outputs, outputs, strict=True)
        for i, (bound, value) in enumerate(blocks, start=len(signature.inputs)):
            for wrong in unanswered:
                by_row = wrong.dim == bound.rows and not bound.rowless
                value = mask_unanswered(value, wrong.where, by_row)
            end = first + _argument_count(bound.plan)
            self._write(i, bound, value, arguments[first:end], rows[bound.rows])
            first = end
        return ()

    def _find_unanswered(
        self, inputs: Sequence[torch.Tensor], rows: dict[str, int]
    ) -> list[_Unanswered]:
        """Find the rows of jagged inputs whose offsets are wrong: the model's answer for such a row
        would look like any other. `rows` is the number of rows by dimension."""
        unanswered = []
        for collection in self.signature.jagged:
            count = rows[self.signature.rows_of[collection]]
            for bound, offsets in zip(self.signature.inputs, inputs, strict=True):
                if bound.block.collection == offsets_of(collection):
                    begin, end = begin_and_end(offsets)
                    unanswered.append(_Unanswered(bound.rows, wrong_offsets(begin, end, count)))
        return unanswered

    def _read(
        self, i: int, bound: BoundBlock, arguments: Sequence[torch.Tensor], n: int
    ) -> torch.Tensor:
        """Make the tensor that the model gets for input block `i` from the arguments of the block.

        These are columns `(n,)`, scalars `(1,)`, or one matrix `(columns, S)`, of which the first n
        entries of each row are in use. `S` is the padded length.
        """
        plan = bound.plan
        dtype = torch_dtype(plan.dtype)
        if plan.kind == "scalars":
            values = torch.cat([scalar.to(dtype) for scalar in arguments]).view(plan.feature_shape)
            return values if bound.rowless else values.expand(n, *plan.feature_shape)
        if plan.kind == "columns":
            stacked = i in self.stacked
            block = arguments[0] if stacked else torch.stack(_cast(arguments, dtype), dim=1)
        else:
            block = arguments[0].narrow(1, 0, n)
            if _is_eigen(bound):
                rows, cols = plan.feature_shape  # Eigen stores a matrix column by column
                split: torch.Tensor = block.unflatten(0, (cols, rows))
                return split.permute(2, 1, 0).to(dtype)
            if not plan.identity:
                block = block.index_select(0, self.get_buffer(f"order_{i}"))
            block = block.transpose(0, 1).to(dtype)
        if not plan.feature_shape:
            return block.select(1, 0)
        if len(plan.feature_shape) == 1:
            return block
        shaped: torch.Tensor = block.unflatten(1, plan.feature_shape)
        return shaped

    def _write(
        self, i: int, bound: BoundBlock, value: torch.Tensor, into: Sequence[torch.Tensor], n: int
    ) -> None:
        """Write the model's output `value` into the arguments of its block, which have the forms
        that `_read` lists. `i` is the index of the block, after all input blocks."""
        plan = bound.plan
        if plan.kind == "scalars":
            flat = value.reshape(-1)
            for index, argument in enumerate(into):
                argument.copy_(flat.narrow(0, index, 1))
            return
        if plan.kind == "matrix" and _is_eigen(bound):
            block = value.permute(2, 1, 0).flatten(0, 1)
            into[0].narrow(1, 0, n).copy_(block)
            return
        block = value.unsqueeze(1) if value.dim() == 1 else value.flatten(1)
        if plan.kind == "columns":
            for index, argument in enumerate(into):
                argument.copy_(block.select(1, index))
            return
        block = block.transpose(0, 1)
        if not plan.identity:
            block = block.index_select(0, self.get_buffer(f"order_{i}"))
        into[0].narrow(1, 0, n).copy_(block)


class TracedProgram(torch.nn.Module):
    """A SoaProgram for torch.jit.trace, which needs a result: it returns its first argument."""

    def __init__(self, program: SoaProgram) -> None:
        super().__init__()
        self.training = False
        self.program = program

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        self.program(*arguments)
        return arguments[0]


def mask_unanswered(value: torch.Tensor, where: torch.Tensor, by_row: bool) -> torch.Tensor:
    """A copy of an output with NaN in the rows that get no answer, for which `where`, (n,), is
    true.

    If not `by_row`, the output has no such rows: all of it is replaced if `where` is true anywhere.
    Signed integers get -1 instead of NaN, unsigned ones their largest value, and bools false.
    """
    number = torch.nan if value.is_floating_point() else -1
    if value.dtype is torch.bool:
        number = 0
    elif not value.dtype.is_signed:
        number = torch.iinfo(value.dtype).max
    where = where.view(-1, *[1] * (value.dim() - 1)) if by_row else where.any()
    return value.masked_fill(where, number)


def outputs_in_order(result: Any, signature: Signature) -> list[torch.Tensor]:
    """What a model returned, as a list of tensors in the order of the output blocks.

    A model may return a tensor, a tuple or list of tensors, or a dict of tensors by block name. In
    a block name, characters of a key that no name may have are underscores. Raises CaptureError if
    the outputs are others than the blocks, or no tensors.
    """
    names = [bound.name for bound in signature.outputs]
    if isinstance(result, torch.Tensor):
        values: list[Any] = [result]
    elif isinstance(result, dict):
        by_name = {to_identifier(str(key)): value for key, value in result.items()}
        if set(by_name) != set(names) or len(by_name) < len(result):
            raise CaptureError(
                f"the model returns outputs {sorted(result)}, the config declares {sorted(names)}"
            )
        values = [by_name[name] for name in names]
    elif isinstance(result, tuple | list):
        values = list(result)
    else:
        values = [result]
    if len(values) != len(names):
        raise CaptureError(
            f"the model returns {len(values)} outputs, the config declares {len(names)}: "
            f"{', '.join(names)}"
        )
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.Tensor):
            raise CaptureError(f"output {name!r} is a {type(value).__name__}, not a tensor")
    return values


def _cast(columns: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The columns in a dtype. A column that has it is not cast: each cast costs export 20 ms, even
    if it changes nothing."""
    return [column if column.dtype == dtype else column.to(dtype) for column in columns]


def _argument_count(plan: Plan) -> int:
    """The number of a block's arguments: one for a matrix, else one for each component."""
    return 1 if plan.kind == "matrix" else len(plan.components)


def _is_eigen(bound: BoundBlock) -> bool:
    """Whether the block is a single column of Eigen matrices. The model takes it as `(n, r, c)`."""
    return (
        len(bound.block.columns) == 1
        and bound.block.shape is None
        and len(bound.plan.feature_shape) == 2
    )
