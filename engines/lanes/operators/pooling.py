"""Pooling: reductions over windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from engines.exported import row_rules
from engines.lanes.functions import RANGES
from engines.lanes.index import Index, Indices, entry
from engines.lanes.operators.pointwise import divide, select
from engines.lanes.operators.reductions import reduced
from engines.lanes.operators.registry import Operator, lowers
from engines.lanes.operators.selection import own, picked
from engines.lanes.operators.views import pad
from engines.lanes.tensor_builder import Builder
from engines.lanes.values import Tensor

Windows = list[list[range]]
"""For each spatial dimension, the places of each window. Only windows that hang over the input have
places outside of it."""


@lowers("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices",
        rows=row_rules.pooled)  # fmt: skip
def max_pool(
    build: Builder, op: Operator, x: Tensor, /, kernel_size: Sequence[int],
    stride: Sequence[int] = (), padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,),
) -> list[Tensor]:  # fmt: skip
    """The largest element of each window, and its place."""
    windows = _windows(op, kernel_size, stride or kernel_size, padding, dilation)
    least = RANGES[x.dtype][0] if x.dtype in RANGES else float("-inf")
    elements = _elements(build, op, x, windows, least)
    inside = _inside(windows, x)
    return [
        reduced(build, "max", elements, _inner(op, elements), op.dtype),
        _places_of_largest(build, op, x, inside),
    ]


@lowers("avg_pool1d", "avg_pool2d", "avg_pool3d", rows=row_rules.pooled)
def mean_pool(
    build: Builder, op: Operator, x: Tensor, /, kernel_size: Sequence[int],
    stride: Sequence[int] = (), padding: Sequence[int] = (0,), count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """A window is divided by its own size. The padding counts, but not what hangs over it."""
    windows = _windows(op, kernel_size, stride or kernel_size, padding, (1,))
    elements = _elements(build, op, x, windows, 0)
    summed = reduced(build, "sum", elements, _inner(op, elements), op.dtype)
    if divisor_override is not None:
        return _divided(build, op, summed, divisor_override)
    room = _each(padding, len(windows)) if count_include_pad else [0] * len(windows)
    return _divided(build, op, summed, _sizes(_inside(windows, x, room)))


@lowers("adaptive_max_pool2d", "adaptive_max_pool3d", rows=row_rules.pooled)
def adaptive_max_pool(build: Builder, op: Operator, x: Tensor, /) -> list[Tensor]:
    windows = _adaptive(op, x)
    elements = _listed(build, op, x, windows)
    return [
        reduced(build, "max", elements, _inner(op, elements), op.dtype),
        _places_of_largest(build, op, x, windows),
    ]


@lowers("_adaptive_avg_pool3d", rows=row_rules.pooled)
def adaptive_mean_pool(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    """The mean of windows that divide the input evenly."""
    windows = _adaptive(op, x)
    elements = _listed(build, op, x, windows)
    shape = [1] * (len(op.shape) - len(windows))
    own_places = build.tensor(_own_places(windows).view(*shape, *elements.shape[len(shape) :]))
    zero = build.tensor(0, op.dtype)
    kept = replace(op, results=(_meta(elements.shape, x.dtype),))
    elements = select(build, kept, own_places, elements, zero)
    summed = reduced(build, "sum", elements, _inner(op, elements), op.dtype)
    return _divided(build, op, summed, _sizes(windows))


def _divided(build: Builder, op: Operator, summed: Tensor, by: int | torch.Tensor) -> Tensor:
    mode = "trunc" if op.dtype in RANGES else None
    return divide(build, op, summed, by, rounding_mode=mode)


def _windows(
    op: Operator, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> Windows:  # fmt: skip
    """The places of each window, along each pooled dimension. Places in the padding are negative or
    too large."""
    dims = _dims(op)
    kernel, stride, padding, dilation = (
        _each(given, dims) for given in (kernel, stride, padding, dilation)
    )
    return [
        [range(o * by - before, o * by - before + k * apart, apart) for o in range(results)]
        for results, k, by, before, apart in zip(
            op.shape[-dims:], kernel, stride, padding, dilation, strict=True
        )
    ]


def _adaptive(op: Operator, x: Tensor) -> Windows:
    """Windows of nearly equal sizes that cover the input."""
    dims = _dims(op)
    return [
        [range(o * size // results, -(-(o + 1) * size // results)) for o in range(results)]
        for size, results in zip(x.shape[-dims:], op.shape[-dims:], strict=True)
    ]


def _dims(op: Operator) -> int:
    """The number of dimensions that are pooled: those before them are channels and batches."""
    return next(d for d in (1, 2, 3) if f"{d}d" in op.name)


def _inside(windows: Windows, x: Tensor, room: Sequence[int] | None = None) -> Windows:
    """The windows without the places outside of the input; with `room` places on both sides."""
    sizes = x.shape[-len(windows) :]
    return [
        [_cut(each, -more, size + more) for each in along]
        for along, size, more in zip(windows, sizes, room or [0] * len(sizes), strict=True)
    ]


def _cut(window: range, begin: int, end: int) -> range:
    kept = [at for at in window if begin <= at < end]
    return range(kept[0], kept[-1] + 1, window.step)


def _sizes(windows: Windows) -> torch.Tensor:
    """The number of places of each window, of shape (results of each dimension)."""
    counts = torch.ones([])
    for along in windows:
        counts = counts.unsqueeze(-1) * torch.tensor([float(len(each)) for each in along])
    return counts


def _elements(build: Builder, op: Operator, x: Tensor, windows: Windows, outside: float) -> Tensor:
    """The elements of windows of equal sizes, of shape (…, results, window). Places outside of the
    input have the value `outside`."""
    lead = len(x.shape) - len(windows)
    sides = [
        (max(-along[0][0], 0), max(along[-1][-1] + 1 - size, 0))
        for along, size in zip(windows, x.shape[lead:], strict=True)
    ]
    if any(map(any, sides)):
        flat = [side for pair in reversed(sides) for side in pair]
        shape = [n + a + b for n, (a, b) in zip(x.shape[lead:], sides, strict=True)]
        wide = _meta((*x.shape[:lead], *shape), x.dtype)
        x = pad(build, Operator("constant_pad_nd", (wide,)), x, flat, outside)
    moved = [
        [range(each[0] + before, each[-1] + before + 1, each.step) for each in along]
        for along, (before, _) in zip(windows, sides, strict=True)
    ]
    return _listed(build, op, x, moved)


def _listed(build: Builder, op: Operator, x: Tensor, windows: Windows) -> Tensor:
    """The elements of windows that lie inside of the input, of shape (…, results, longest window).
    A shorter window repeats its last element."""
    dims, lead = len(windows), len(x.shape) - len(windows)

    def where(index: Indices) -> Indices:
        results, inside = index[lead : lead + dims], index[lead + dims :]
        return (*index[:lead], *map(_place, windows, results, inside))

    return build.view(x, (*op.shape, *(len(_table(along)[0]) for along in windows)), where)


def _place(along: Sequence[range], result: Index, k: Index) -> Index:
    """The place of element k of a window. It is a plain sum if the windows are regular."""
    first = along[0]
    by = along[-1][0] - along[-2][0] if len(along) > 1 else 0
    starts = (first[0] + o * by for o in range(len(along)))
    if list(along) == [range(at, at + len(first) * first.step, first.step) for at in starts]:
        return result * by + k * first.step + first[0]
    table = _table(along)
    return entry(tuple(at for each in table for at in each), result * len(table[0]) + k)


def _table(along: Sequence[range]) -> list[list[int]]:
    longest = max(map(len, along))
    return [[each[min(k, len(each) - 1)] for k in range(longest)] for each in along]


def _own_places(windows: Windows) -> torch.Tensor:
    """For each element of `_listed`: true if it is no repetition. Shape (results, window)."""
    inside_all = torch.ones([], dtype=torch.bool)
    for d, along in enumerate(windows):
        longest = max(map(len, along))
        own_places = torch.tensor([[k < len(each) for k in range(longest)] for each in along])
        shape = [1] * (2 * len(windows))
        shape[d], shape[len(windows) + d] = own_places.shape
        inside_all = inside_all & own_places.view(shape)
    return inside_all


def _places_of_largest(build: Builder, op: Operator, x: Tensor, windows: Windows) -> Tensor:
    """The place of each window's largest element in the flat input. Of equal elements torch takes
    the first, but of several NaN the last."""
    elements = _listed(build, op, x, windows)
    inner, lead = _inner(op, elements), len(op.shape) - len(windows)
    at = reduced(build, "argmax", elements, inner, "int64")
    if x.dtype not in RANGES:
        last = math.prod(elements.shape[d] for d in inner) - 1
        nan = build.map("isnan", [elements], elements.shape, "bool", of=x.dtype)
        mirrored = build.view(nan, nan.shape, lambda index: _mirrored(index, nan.shape, inner))
        behind = reduced(build, "argmax", build.cast(mirrored, "int32"), inner, "int64")
        of_nan = build.map("sub", [last, behind], op.shape, "int64")
        found = Operator("where", (_meta(op.shape, "int64"),))
        at = select(build, found, reduced(build, "any", nan, inner, "bool"), of_nan, at)
    numbers = build.tensor(_flat_places(windows, x.shape[lead:]))
    return picked(build, numbers, op.shape, [*(own(d) for d in range(lead, len(op.shape))), at])


def _mirrored(index: Indices, shape: Sequence[int], dims: Sequence[int]) -> Indices:
    return tuple(i * -1 + (shape[d] - 1) if d in dims else i for d, i in enumerate(index))


def _flat_places(windows: Windows, shape: Sequence[int]) -> torch.Tensor:
    """The places of all elements of `_listed` in the flat input, of shape (results, elements)."""
    flat = torch.zeros([], dtype=torch.int64)
    for d, (along, size) in enumerate(zip(windows, shape, strict=True)):
        places = torch.tensor(_table(along))
        own_shape = [1] * (2 * len(windows))
        own_shape[d], own_shape[len(windows) + d] = places.shape
        flat = flat * size + places.view(own_shape)
    return flat.flatten(len(windows))


def _inner(op: Operator, elements: Tensor) -> list[int]:
    return list(range(len(op.shape), len(elements.shape)))


def _meta(shape: Sequence[int], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _each(given: Sequence[int], dims: int) -> list[int]:
    given = [given] if isinstance(given, int) else list(given)
    return given * (dims if len(given) == 1 else 1)
