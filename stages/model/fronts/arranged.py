"""How the user's own model is called: the order of the axes of each input and output.

A block gives `(n, *shape)`. Many networks take items before features, or the rows as their second
axis. Reordering is part of the captured graph, so a compiler reads the user's columns directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from soa.text import to_identifier
from stages.model.fronts.preprocess import InFront

Takes = Literal["tensors", "dict", "list"]
"""What `forward` takes: tensors, one dict of tensors by the names of the inputs, or one list."""


@dataclass(frozen=True)
class Order:
    """The order of the axes of a tensor.

    `permute` has the indices of the axes in their new order, as torch's permute takes them; empty:
    the axes stay as they are. With `flatten`, all axes but the first are then joined to one.
    """

    permute: tuple[int, ...] = ()
    flatten: bool = False

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor with its axes in this order."""
        x = x.permute(self.permute) if self.permute else x
        return x.flatten(1) if self.flatten else x


@dataclass(frozen=True)
class Arrangement:
    """How a model is called: the order of the axes of each input and of each output.

    `inputs[i].of` a block gives the model's input i. `outputs[i].of` the model's output i has the
    rows first. `takes` is the form of its arguments; `names` are the keys if this is a dict.
    """

    inputs: tuple[Order, ...]
    outputs: tuple[Order, ...]
    takes: Takes = "tensors"
    names: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether the model takes and returns the blocks as they are."""
        return self.takes == "tensors" and {*self.inputs, *self.outputs} <= {Order()}

    def call(self, model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
        """Call the model with these inputs, whose rows come first, and return what it returns."""
        arranged = [order.of(x) for order, x in zip(self.inputs, inputs, strict=True)]
        if self.takes == "tensors":
            return model(*arranged)
        if self.takes == "list":
            return model(arranged)
        return model(_ByName(zip(self.names, arranged, strict=True)))

    def with_rows_first(self, returned: Any) -> Any:
        """What the model returned, in the same form, with the rows of each output first. If the
        number of outputs is another one than that of `outputs`, it is returned as it is."""
        values = _as_list(returned)
        if len(values) != len(self.outputs):
            return returned
        values_in_order = [
            order.of(value) if isinstance(value, torch.Tensor) else value
            for order, value in zip(self.outputs, values, strict=True)
        ]
        if isinstance(returned, Mapping):
            return dict(zip(returned, values_in_order, strict=True))
        return values_in_order if isinstance(returned, tuple | list) else values_in_order[0]


class _ByName(dict[str, torch.Tensor]):
    """Inputs by their names in the config. A key that cannot be a name there, such as `pt/GeV`,
    stands for the name that the config gives it (`to_identifier`)."""

    def __missing__(self, key: str) -> torch.Tensor:
        if key == to_identifier(key):
            raise KeyError(key)
        return self[to_identifier(key)]


def _as_list(returned: Any) -> list[Any]:
    """The outputs as a list, from what a model returned: a tensor, or a dict, tuple or list of
    tensors."""
    if isinstance(returned, Mapping):
        return [*returned.values()]
    return [*returned] if isinstance(returned, tuple | list) else [returned]


class Arranged(InFront):
    """A model whose inputs and outputs have the rows first, around one that has another order of
    axes. The plan is one Arrangement."""

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (arrangement,) = self.plan
        return [order.of(x) for order, x in zip(arrangement.inputs, inputs, strict=True)]

    def forward(self, *inputs: torch.Tensor) -> Any:
        (arrangement,) = self.plan
        return arrangement.with_rows_first(arrangement.call(self.model, inputs))
