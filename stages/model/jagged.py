"""Jagged rows inside the model: items and offsets in, rows padded to one width out.

It is part of the captured graph, where a compiler reads each item where it lies in the user's
columns and writes it once, to its place in the padded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from soa.dtypes import torch_dtype
from stages.model.preprocess import InFront


@dataclass(frozen=True)
class Padding:
    """An input of the model that is made of the first `length` items of each row.

    `items` and `offsets` are places among the blocks: (m, ...) and (n, 2), begin and end. The model
    gets (n, ..., length), or (n, length, ...) with `items_first`; `value` where there is no item.
    """

    items: int
    offsets: int
    length: int
    value: float = 0.0
    items_first: bool = False


@dataclass(frozen=True)
class Mask:
    """An input of the model that is 1 where a row has an item, else 0: (n, *shape) of `dtype`."""

    items: int
    offsets: int
    length: int
    shape: tuple[int, ...]
    dtype: str


Inputs = tuple[int | Padding | Mask, ...]
"""Each input of a model: a block as it is, by its place, or what is made of jagged ones."""


class Padded(InFront):
    """A model of padded rows that takes items and offsets.

    Whatever the offsets hold, nothing outside the items is read. A row whose offsets are not
    0 <= begin <= end <= m has no right answer: its floating-point features are NaN, none masked.
    """

    steps: torch.Tensor

    def __init__(self, model: torch.nn.Module, inputs: Inputs) -> None:
        super().__init__(model)
        self.inputs = inputs
        longest = max((one.length for one in inputs if not isinstance(one, int)), default=0)
        self.register_buffer("steps", torch.arange(longest))

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            inputs[one]
            if isinstance(one, int)
            else self._made(one, inputs[one.items], inputs[one.offsets])
            for one in self.inputs
        ]

    def around(self, model: torch.nn.Module) -> Padded:
        return Padded(model, self.inputs)

    def _made(
        self, one: Padding | Mask, items: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        count = items.shape[0]
        begin, end = offsets.to(torch.int64).unsqueeze(2).unbind(1)
        wrong = (begin < 0) | (end < begin) | (end > count)
        index = begin + self.steps[: one.length]
        if isinstance(one, Mask):
            mask: torch.Tensor = ((index < end) | wrong).unflatten(1, one.shape)
            return mask.to(torch_dtype(one.dtype))
        # One more item, at the end, for the places that have none: so there is one, also in an
        # event without items.
        index = torch.where((index < end) & ~wrong, index, count)
        features = []
        for column in items.flatten(1).unbind(1):
            found = pad(column, (0, 1), value=one.value)[index]
            features.append(found.masked_fill(wrong, torch.nan) if found.is_floating_point() else found)
        if one.items_first:
            return torch.stack(features, dim=2)
        return torch.stack(features, dim=1).unflatten(1, items.shape[1:])
