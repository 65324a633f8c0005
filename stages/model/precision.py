"""Run a model in less precision than it was trained in. Only the config can ask for this.

The reference is computed by the unchanged model, so validation shows the loss of precision.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from engines.errors import TargetError
from engines.target import Target
from runtime.checked import Tolerance, default_tolerance
from stages.model.fronts import InFront

Precision = Literal["fp32", "tf32", "fp16", "bf16"]

DTYPES: dict[Precision, str] = {
    "fp32": "float32",
    "tf32": "float32",  # stored as float32; a GPU multiplies with ten bits of mantissa
    "fp16": "float16",
    "bf16": "bfloat16",
}


def precision_tolerance(precision: Precision) -> Tolerance:
    """The tolerance that a model in this precision needs, since it rounds more than the model in
    its own precision, which computes the reference."""
    # A TF32 product has float16's mantissa; its range and its sums are those of float32.
    return default_tolerance("float16" if precision == "tf32" else DTYPES[precision])


@contextmanager
def tf32_switches(precision: Precision) -> Iterator[None]:
    """Turn TF32 on if `precision` is tf32, else off, until the block ends. This is for the whole
    process."""
    # torch has an older and a newer switch. Once the newer one is set, torch 2.13 cannot export.
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def check_precision(precision: Precision, target: Target) -> None:
    """Raise TargetError if a target cannot compute in this precision."""
    if precision == "tf32" and not target.has_tf32:
        raise TargetError(
            f"precision tf32: {target} has no TF32, which CUDA GPUs have from sm_80 on; "
            "use fp32 there"
        )


class Reduced(InFront):
    """Casts floating-point inputs to the dtype of the model's weights. The plan is this dtype."""

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (dtype,) = self.plan
        return [x.to(dtype) if x.is_floating_point() else x for x in inputs]


def in_precision(model: torch.nn.Module, precision: Precision) -> torch.nn.Module:
    """The model in `precision`: a copy with its weights in float16 or bfloat16, whose inputs are
    cast.

    For fp32 and tf32 it is the model itself, since TF32 is no dtype of weights: see
    `tf32_switches`. Modules that prepare its inputs compute as before.
    """
    if DTYPES[precision] == "float32":
        return model
    if isinstance(model, InFront):
        return model.around(in_precision(model.model, precision))
    dtype = getattr(torch, DTYPES[precision])
    return Reduced(copy.deepcopy(model).to(dtype), [dtype])
