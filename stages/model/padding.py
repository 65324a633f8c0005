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

    Whatever the offsets hold, nothing outside the items is read. A row whose offsets are not
    0 <= begin <= end <= m has no right answer: its floating-point features are NaN.
    """

    steps: torch.Tensor

    def __init__(self, model: torch.nn.Module, plan: Sequence[int | Padding]) -> None:
        super().__init__(model, plan)
        longest = max(one.length for one in plan if isinstance(one, Padding))
        self.register_buffer("steps", torch.arange(longest))

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[i] if isinstance(i, int) else self.padded(i, inputs) for i in self.plan]

    def padded(self, one: Padding, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        offsets = inputs[one.offsets]
        begin, end = (offsets.select(1, k).to(torch.int64).unsqueeze(1) for k in (0, 1))
        index = begin + self.steps[: one.length]
        exists = index < end
        if one.items is None:
            mask = _kept(exists.to(torch_dtype(one.dtype)))
            return mask.view(-1, *(one.shape or (1, one.length)))
        items = inputs[one.items]
        count, flat = items.shape[0], items.flatten(1)
        # Behind the items lie a row of `value`, for the places without an item, and one of NaN.
        # So padding is one gather of rows, in front of which a linear layer may move (aoti-folded).
        absent = [one.value, torch.nan] if items.is_floating_point() else [one.value]
        rows = torch.cat([flat, *(flat.new_full((1, flat.shape[1]), value) for value in absent)])
        wrong = (begin < 0) | (end < begin) | (end > count)
        index = torch.where(exists, index, count)
        found = rows[_kept(torch.where(wrong, count + len(absent) - 1, index))]
        if one.shape is not None:
            return found.squeeze(2) if len(one.shape) == 1 else found
        return found.transpose(1, 2).contiguous().view(-1, *items.shape[1:], one.length)


def _kept(values: torch.Tensor) -> torch.Tensor:
    """(n, length), in memory of their own: else Inductor computes them again for each feature."""
    return torch.cat([values, values.new_zeros((1, values.shape[1]))])[:-1]
