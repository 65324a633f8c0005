"""A model in less precision than it was trained in: chosen in the config, never silently.

The reference stays the model as it is, so validation shows what the precision costs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch

from stages.preprocess import Preprocessed

Precision = Literal["fp32", "fp16", "bf16"]

DTYPES: dict[Precision, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class Reduced(torch.nn.Module):
    """A model whose weights are in `dtype`, behind the cast of its floating-point inputs to it."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.training = False  # not eval(): an exported model refuses to be told twice
        self.model = model
        self.dtype = dtype

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The arguments of the model inside."""
        return [x.to(self.dtype) if x.is_floating_point() else x for x in inputs]

    def around(self, model: torch.nn.Module) -> Reduced:
        """The same in front of another form of the model inside."""
        return Reduced(model, self.dtype)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.model(*self.prepare(inputs))


def in_precision(model: torch.nn.Module, precision: Precision) -> torch.nn.Module:
    """The model itself, or a copy in `precision`; what prepares its inputs stays as it is."""
    if precision == "fp32":
        return model
    if isinstance(model, Preprocessed):
        return model.around(in_precision(model.model, precision))
    dtype = getattr(torch, DTYPES[precision])
    return Reduced(copy.deepcopy(model).to(dtype), dtype)
