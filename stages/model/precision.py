"""A model in less precision than it was trained in: chosen in the config, never silently.

The reference stays the model as it is, so validation shows what the precision costs.
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
from stages.model.preprocess import InFront

Precision = Literal["fp32", "tf32", "fp16", "bf16"]

DTYPES: dict[Precision, str] = {
    "fp32": "float32",
    "tf32": "float32",  # stored so: a GPU rounds what it multiplies to ten bits behind the point
    "fp16": "float16",
    "bf16": "bfloat16",
}


def precision_tolerance(precision: Precision) -> Tolerance:
    """How far an output may differ because of the precision alone."""
    # A product in TF32 has the mantissa of float16, and float32's range and sums.
    return default_tolerance("float16" if precision == "tf32" else DTYPES[precision])


@contextmanager
def tf32_switches(precision: Precision) -> Iterator[None]:
    """Turn TF32 on if that is the precision, else off: for the whole process, while this lasts."""
    # By the older of two switches: after the newer one torch 2.13 exports no model any more.
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def check_precision(precision: Precision, target: Target) -> None:
    """Raise TargetError where a target has no such arithmetic."""
    if precision == "tf32" and not target.has_tf32:
        raise TargetError(
            f"precision tf32: {target} has no TF32, which CUDA GPUs have from sm_80 on; "
            "use fp32 there"
        )


class Reduced(InFront):
    """A model whose weights are in the planned dtype, behind the cast of its floating-point inputs
    to it."""

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (dtype,) = self.plan
        return [x.to(dtype) if x.is_floating_point() else x for x in inputs]


def in_precision(model: torch.nn.Module, precision: Precision) -> torch.nn.Module:
    """The model itself, or a copy in `precision`; what prepares its inputs stays as it is."""
    if DTYPES[precision] == "float32":
        return model
    if isinstance(model, InFront):
        return model.around(in_precision(model.model, precision))
    dtype = getattr(torch, DTYPES[precision])
    return Reduced(copy.deepcopy(model).to(dtype), [dtype])
