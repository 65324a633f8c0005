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
    """A module that the pipeline puts in front of a user's model.

    It takes the blocks, makes the model's inputs of them by `prepare`, and calls the model. What
    `plan` holds is described by each subclass.
    """

    def __init__(self, model: torch.nn.Module, plan: Sequence[Any] = ()) -> None:
        super().__init__()
        self.training = False  # not by eval(): an exported model refuses a second call of it
        self.model, self.plan = model, tuple(plan)

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The arguments for the model, made of this module's own inputs."""
        raise NotImplementedError

    def around(self, model: torch.nn.Module) -> InFront:
        """A module with the same plan in front of `model`, another form of the user's model."""
        return type(self)(model, self.plan)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.model(*self.prepare(inputs))


class Preprocessed(InFront):
    """Computes the model's features from the raw blocks. The plan has Features for each block, or
    None if the block is passed as it is."""

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            values if block is None else compute_features(block, values)
            for block, values in zip(self.plan, inputs, strict=True)
        ]


class Copied(InFront):
    """Copies those inputs into which the model writes, so that the caller's memory does not change.
    The plan has their indices."""

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [x.clone() if i in self.plan else x for i, x in enumerate(inputs)]


def compute_features(block: Features, values: torch.Tensor) -> torch.Tensor:
    """Compute the K features of a block, (n, F) -> (n, K), or (n, K, *extents) if it has Eigen
    columns. A plain column is then repeated over the extents."""
    flat = values.flatten(1)
    extents = block.extents
    columns: dict[str, torch.Tensor] = {}
    start = 0
    for name, shape in block.columns:
        width = math.prod(shape)
        own_extents = shape or (1,) * len(extents)  # ones, so that the column is repeated
        if own_extents:
            columns[name] = flat.narrow(1, start, width).unflatten(1, own_extents)
        else:
            columns[name] = flat.select(1, start)
        start += width
    results = [evaluate(expression, columns).expand(-1, *extents) for expression in block.values]
    stacked = torch.stack(results, dim=1)
    if block.exists is None:
        return stacked
    return torch.where((columns[block.exists] > 0).unsqueeze(1), stacked, block.pad)


def evaluate(expression: Expression, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute an expression in each row. `columns` has the values of each column, by name."""
    value = columns[expression.column]
    for step in expression.steps:
        if step.operand is None:
            function, _ = UNARY[step.name]
            value = function(value, *step.numbers)
        elif isinstance(step.operand, Expression):
            value = BINARY[step.name](value, evaluate(step.operand, columns))
        else:
            value = BINARY[step.name](value, step.operand)
    return value
