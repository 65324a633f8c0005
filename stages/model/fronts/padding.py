"""Jagged rows inside the model: items and offsets in, rows padded to one width out.

Padding is part of the captured graph. A compiler reads each item from the user's columns and writes
it once, to its place in the padded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from soa.dtypes import torch_dtype
from stages.model.fronts.preprocess import InFront


@dataclass(frozen=True)
class Padding:
    """An input of the model that is made of the first `length` items of each row.

    `items` is the index of the block of items, (m, ...); `offsets` is that of the block with the
    begin and end of each row, (n, 2). The model gets (n, ..., length). If `shape` is given, it gets
    (n, length, ...) instead, or (n, length) for items of one column. Places without an item hold
    `value`. If `items` is None, the input is a mask of `dtype`, which is 1 where an item exists:
    (n, 1, length), or (n, *shape) if `shape` is given.
    """

    offsets: int
    length: int
    items: int | None
    value: float = 0.0
    shape: tuple[int, ...] | None = None
    dtype: str = "float32"


class Padded(InFront):
    """Makes padded rows of items and offsets, for a model of padded rows. The plan has an entry for
    each input of the model: the index of a block that is passed as it is, or a Padding.

    Nothing outside the items is read, whatever the offsets hold: a row with wrong offsets has no
    items. soa_program.py replaces the answer of such a row when outputs are written.
    """

    steps: torch.Tensor

    def __init__(self, model: torch.nn.Module, plan: Sequence[int | Padding]) -> None:
        super().__init__(model, plan)
        longest = max(entry.length for entry in plan if isinstance(entry, Padding))
        self.register_buffer("steps", torch.arange(longest))

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            inputs[entry] if isinstance(entry, int) else self.pad(entry, inputs)
            for entry in self.plan
        ]

    def pad(self, padding: Padding, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make one input of the model: padded rows of items, by one gather, or the mask. `inputs`
        are all blocks."""
        begin, end = (column.unsqueeze(1) for column in begin_and_end(inputs[padding.offsets]))
        index = begin + self.steps[: padding.length]  # of the item for each place, (n, length)
        exists = index < end
        if padding.items is None:
            mask = _in_own_memory(exists.to(torch_dtype(padding.dtype)))
            return mask.view(-1, *(padding.shape or (1, padding.length)))
        items = inputs[padding.items]
        flat, count = items.flatten(1), items.shape[0]
        exists = exists & ~wrong_offsets(begin, end, count)
        # A row of `value` follows the items and fills the places without an item. So padding is one
        # gather of rows, and a compiler may move a linear layer in front of it.
        rows = torch.cat([flat, flat.new_full((1, flat.shape[1]), padding.value)])
        rows_of_items = rows[_in_own_memory(torch.where(exists, index, count))]
        if padding.shape is not None:
            return rows_of_items.squeeze(2) if len(padding.shape) == 1 else rows_of_items
        return rows_of_items.transpose(1, 2).contiguous().view(-1, *items.shape[1:], padding.length)


def begin_and_end(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The begin and the end of each row, `(n,)` as int64, from a block of offsets, `(n, 2)`."""
    return offsets.select(1, 0).to(torch.int64), offsets.select(1, 1).to(torch.int64)


def wrong_offsets(begin: torch.Tensor, end: torch.Tensor, count: int) -> torch.Tensor:
    """For each row: whether its offsets are wrong, that is not 0 <= begin <= end <= count. `count`
    is the number of items."""
    return (begin < 0) | (end < begin) | (end > count)


def _in_own_memory(values: torch.Tensor) -> torch.Tensor:
    """A copy of the values, (n, length), which Inductor stores: it would compute them again for
    each feature. Since it leaves out a plain copy, a row is added and cut off."""
    return torch.cat([values, values.new_zeros((1, values.shape[1]))])[:-1]
