"""Pooling: reductions over windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engines.lanes.index import Indices
from engines.lanes.operators.reductions import reduced
from engines.lanes.operators.registry import Step, lowers
from engines.lanes.operators.views import pad
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import Tensor

_MAX = ("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices")
_MEAN = ("avg_pool1d", "avg_pool2d", "avg_pool3d")


@lowers(*_MAX)
def max_pool(
    build: Builder, step: Step, x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), ceil: bool = False,
) -> list[Tensor]:  # fmt: skip
    windows = _windows(build, step, x, kernel, stride or kernel, padding, dilation, float("-inf"))
    return [reduced(build, "max", windows, _inner(windows, step), step.dtype), x]


@lowers(*_MEAN)
def mean_pool(
    build: Builder, step: Step, x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] = (0,), ceil: bool = False, padding_counts: bool = True,
    divisor: int | None = None,
) -> Tensor:  # fmt: skip
    windows = _windows(build, step, x, kernel, stride or kernel, padding, (1,), 0.0)
    summed = reduced(build, "sum", windows, _inner(windows, step), step.dtype)
    # torch itself gives the divisors: the sum of a window of ones, divided by its mean.
    function = getattr(torch.nn.functional, step.name)
    ones = torch.ones(x.shape, dtype=step.results[0].dtype)
    size = float(torch.tensor(_each(kernel, len(step.shape) - 2)).prod())
    if divisor is not None:
        counts: Any = float(divisor)
    else:
        full = function(ones, kernel, stride or kernel, padding, ceil, True) * size
        mean = function(ones, kernel, stride or kernel, padding, ceil, padding_counts)
        counts = full / mean
    return build.map("div", [summed, counts], step.shape, step.dtype, 4)


def _windows(
    build: Builder, step: Step, x: Tensor, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], outside: float,
) -> Tensor:  # fmt: skip
    """The elements of every window, of shape (…, results, window). Places outside of the input have
    the value `outside`."""
    spatial = step.shape[2:] if len(x.shape) > 2 else step.shape[1:]
    dims, lead = len(spatial), len(x.shape) - len(spatial)
    kernel, stride, padding, dilation = (
        _each(given, dims) for given in (kernel, stride, padding, dilation)
    )
    needed = [
        (out - 1) * by + apart * (k - 1) + 1
        for out, by, apart, k in zip(spatial, stride, dilation, kernel, strict=True)
    ]
    sides = [
        (p, max(room - size - p, 0))
        for p, room, size in zip(padding, needed, x.shape[lead:], strict=True)
    ]
    if any(map(any, sides)):
        flat = [side for pair in reversed(sides) for side in pair]
        shape = [
            *x.shape[:lead],
            *(n + a + b for n, (a, b) in zip(x.shape[lead:], sides, strict=True)),
        ]
        result = torch.empty(shape, dtype=getattr(torch, x.dtype), device="meta")
        x = pad(build, Step("constant_pad_nd", (result,)), x, flat, outside)
    elif x.dtype != step.dtype:
        raise NotKnown("pooling that changes the dtype")

    def where(index: Indices) -> Indices:
        results, inside = index[lead : lead + dims], index[lead + dims :]
        places = (
            i * by + k * apart
            for i, by, k, apart in zip(results, stride, inside, dilation, strict=True)
        )
        return (*index[:lead], *places)

    return build.view(x, (*step.shape, *kernel), where)


def _inner(windows: Tensor, step: Step) -> list[int]:
    return list(range(len(step.shape), len(windows.shape)))


def _each(given: Sequence[int], dims: int) -> list[int]:
    return list(given) * (dims if len(given) == 1 else 1)
