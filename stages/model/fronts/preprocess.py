"""Preprocessing as part of the model: a torch module in front of the user's own.

Capture, the reference and the eager baseline use both together as the model, so the artifact takes
raw columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stages.model.fronts.expressions import BINARY, UNARY, Expression, Features


class InFront(torch.nn.Module):
    """A module that the pipeline puts in front of a user's model: `prepare` makes the model's
    inputs, as `plan` describes them."""

    def __init__(self, model: torch.nn.Module, plan: Sequence[Any] = ()) -> None:
        super().__init__()
        self.training = False  # not by eval(): an exported model refuses a second call of it
        self.model, self.plan = model, tuple(plan)

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The arguments for the user's model."""
        raise NotImplementedError

    def around(self, model: torch.nn.Module) -> InFront:
        """This module in front of another form of the user's model."""
        return type(self)(model, self.plan)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.model(*self.prepare(inputs))


class Preprocessed(InFront):
    """A model that takes the raw blocks. The plan has Features for each block, or None if the block
    is passed as it is."""

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            given if block is None else features(block, given)
            for block, given in zip(self.plan, inputs, strict=True)
        ]


class Copied(InFront):
    """A model that writes into some inputs; `plan` has their indices. The graph copies these."""

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [x.clone() if i in self.plan else x for i, x in enumerate(inputs)]


def features(block: Features, given: torch.Tensor) -> torch.Tensor:
    """K features of a block: (n, F) -> (n, K), or (n, K, *extents) with Eigen columns.

    A column without extents is repeated over the extents of a row.
    """
    flat = given.flatten(1)
    extents = block.extents
    columns: dict[str, torch.Tensor] = {}
    at = 0
    for name, shape in block.columns:
        width, one = math.prod(shape), shape or (1,) * len(extents)
        columns[name] = flat.narrow(1, at, width).unflatten(1, one) if one else flat.select(1, at)
        at += width
    values = [evaluate(value, columns).expand(-1, *extents) for value in block.values]
    stacked = torch.stack(values, dim=1)
    if block.exists is None:
        return stacked
    return torch.where((columns[block.exists] > 0).unsqueeze(1), stacked, block.pad)


def evaluate(expression: Expression, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The value of an expression in each row."""
    value = columns[expression.column]
    for step in expression.steps:
        if step.operand is None:
            value = UNARY[step.name][0](value, *step.numbers)
        else:
            other = step.operand
            second = evaluate(other, columns) if isinstance(other, Expression) else other
            value = BINARY[step.name](value, second)
    return value
