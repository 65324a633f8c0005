"""Jagged rows inside the model: items and offsets in, rows padded to one width out.

It is part of the captured graph, where a compiler reads each item where it lies in the user's
columns and writes it once, to its place in the padded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from soa.dtypes import torch_dtype
from stages.model.preprocess import InFront


@dataclass(frozen=True)
class Padding:
    """An input of the model that is made of the first `length` items of each row.

    `items` and `offsets` are places among the blocks: (m, ...) and (n, 2), begin and end. The model
    gets (n, ..., length), with a `shape` (n, length, ...), or of one column (n, length), and
    `value` where there is no item.
    Without `items` it is a mask of `dtype`, 1 where there is one: (n, 1, length), or (n, *shape).
    """

    offsets: int
    length: int
    items: int | None
    value: float = 0.0
    shape: tuple[int, ...] | None = None
    dtype: str = "float32"


class Padded(InFront):
    """A model of padded rows that takes items and offsets. The plan has an entry for each of its
    inputs: a block as it is, by its place, or made of jagged ones.

    Whatever the offsets hold, nothing outside the items is read: a row whose offsets are wrong has
    none. Its answer is taken from it where outputs are written (convention.py).
    """

    steps: torch.Tensor

    def __init__(self, model: torch.nn.Module, plan: Sequence[int | Padding]) -> None:
        super().__init__(model, plan)
        longest = max(one.length for one in plan if isinstance(one, Padding))
        self.register_buffer("steps", torch.arange(longest))

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[i] if isinstance(i, int) else self.padded(i, inputs) for i in self.plan]

    def padded(self, one: Padding, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        begin, end = (column.unsqueeze(1) for column in begin_and_end(inputs[one.offsets]))
        index = begin + self.steps[: one.length]
        exists = index < end
        if one.items is None:
            mask = _kept(exists.to(torch_dtype(one.dtype)))
            return mask.view(-1, *(one.shape or (1, one.length)))
        items = inputs[one.items]
        flat, count = items.flatten(1), items.shape[0]
        exists = exists & ~wrong_offsets(begin, end, count)
        # Behind the items lies a row of `value`, for the places without an item. So padding is one
        # gather of rows, in front of which a linear layer may move.
        rows = torch.cat([flat, flat.new_full((1, flat.shape[1]), one.value)])
        found = rows[_kept(torch.where(exists, index, count))]
        if one.shape is not None:
            return found.squeeze(2) if len(one.shape) == 1 else found
        return found.transpose(1, 2).contiguous().view(-1, *items.shape[1:], one.length)


def begin_and_end(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two columns of a block of offsets (n, 2), in 64 bits."""
    return offsets.select(1, 0).to(torch.int64), offsets.select(1, 1).to(torch.int64)


def wrong_offsets(begin: torch.Tensor, end: torch.Tensor, count: int) -> torch.Tensor:
    """Where they are not 0 <= begin <= end <= count, the number of items there are."""
    return (begin < 0) | (end < begin) | (end > count)


def _kept(values: torch.Tensor) -> torch.Tensor:
    """(n, length), in memory of their own: else Inductor computes them again for each feature."""
    return torch.cat([values, values.new_zeros((1, values.shape[1]))])[:-1]
