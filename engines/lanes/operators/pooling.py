"""Pooling: reductions over windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from engines.exported import row_rules
from engines.lanes.functions import RANGES
from engines.lanes.index import Index, Indices, entry
from engines.lanes.operators.pointwise import divide, select
from engines.lanes.operators.products import per_dim
from engines.lanes.operators.reductions import reduced
from engines.lanes.operators.registry import Operator, lowers
from engines.lanes.operators.selection import picked, same_index
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
    return [
        reduced(build, "max", elements, _window_dims(op, elements), op.dtype),
        _places_of_largest(build, op, x, _inside(windows, x)),
    ]


@lowers("avg_pool1d", "avg_pool2d", "avg_pool3d", rows=row_rules.pooled)
def mean_pool(
    build: Builder, op: Operator, x: Tensor, /, kernel_size: Sequence[int],
    stride: Sequence[int] = (), padding: Sequence[int] = (0,), count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """The mean of each window. The padding counts as elements, but not what hangs over it."""
    windows = _windows(op, kernel_size, stride or kernel_size, padding, (1,))
    elements = _elements(build, op, x, windows, 0)
    summed = reduced(build, "sum", elements, _window_dims(op, elements), op.dtype)
    if divisor_override is not None:
        return _divided(build, op, summed, divisor_override)
    room = per_dim(padding, len(windows)) if count_include_pad else [0] * len(windows)
    return _divided(build, op, summed, _sizes(_inside(windows, x, room)))


@lowers("adaptive_max_pool2d", "adaptive_max_pool3d", rows=row_rules.pooled)
def adaptive_max_pool(build: Builder, op: Operator, x: Tensor, /) -> list[Tensor]:
    """The largest element of windows that cover the input, and its place."""
    windows = _adaptive(op, x)
    elements = _listed(build, op, x, windows)
    return [
        reduced(build, "max", elements, _window_dims(op, elements), op.dtype),
        _places_of_largest(build, op, x, windows),
    ]


@lowers("_adaptive_avg_pool3d", rows=row_rules.pooled)
def adaptive_mean_pool(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    """The mean of windows that cover the input."""
    windows = _adaptive(op, x)
    elements = _listed(build, op, x, windows)
    lead = len(op.shape) - len(windows)
    own_places = _own_places(windows).view(*[1] * lead, *elements.shape[lead:])
    of_elements = replace(op, results=(_meta(elements.shape, x.dtype),))
    mask, zero = build.tensor(own_places), build.tensor(0, op.dtype)
    elements = select(build, of_elements, mask, elements, zero)
    summed = reduced(build, "sum", elements, _window_dims(op, elements), op.dtype)
    return _divided(build, op, summed, _sizes(windows))


def _divided(build: Builder, op: Operator, summed: Tensor, by: int | torch.Tensor) -> Tensor:
    """The quotient; of integers, rounded to zero."""
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
        per_dim(sizes, dims) for sizes in (kernel, stride, padding, dilation)
    )
    windows = []
    for d, results in enumerate(op.shape[-dims:]):
        begins = range(-padding[d], results * stride[d] - padding[d], stride[d])
        reach = kernel[d] * dilation[d]
        windows.append([range(begin, begin + reach, dilation[d]) for begin in begins])
    return windows


def _adaptive(op: Operator, x: Tensor) -> Windows:
    """Windows of nearly equal sizes that cover the input. Window i begins at i * size / results,
    rounded down, and ends where the next would begin, rounded up."""
    dims = _dims(op)
    return [
        [range(i * size // results, -(-(i + 1) * size // results)) for i in range(results)]
        for size, results in zip(x.shape[-dims:], op.shape[-dims:], strict=True)
    ]


def _dims(op: Operator) -> int:
    """The number of dimensions that are pooled: those before them are channels and batches."""
    return next(d for d in (1, 2, 3) if f"{d}d" in op.name)


def _inside(windows: Windows, x: Tensor, room: Sequence[int] | None = None) -> Windows:
    """The windows without the places outside of the input; it has `room` more on both sides."""
    sizes = x.shape[-len(windows) :]
    return [
        [_cut(window, -more, size + more) for window in along]
        for along, size, more in zip(windows, sizes, room or [0] * len(sizes), strict=True)
    ]


def _cut(window: range, begin: int, end: int) -> range:
    """The places of a window from `begin` to `end` - 1, of which there is at least one."""
    places = [place for place in window if begin <= place < end]
    return range(places[0], places[-1] + 1, window.step)


def _sizes(windows: Windows) -> torch.Tensor:
    """The number of places of each window, of shape (results of each dimension)."""
    counts = torch.ones([])
    for along in windows:
        counts = counts.unsqueeze(-1) * torch.tensor([float(len(window)) for window in along])
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
        last_dim_first = [side for pair in reversed(sides) for side in pair]
        shape = [n + a + b for n, (a, b) in zip(x.shape[lead:], sides, strict=True)]
        wide = _meta((*x.shape[:lead], *shape), x.dtype)
        x = pad(build, Operator("constant_pad_nd", (wide,)), x, last_dim_first, outside)
    in_padded = [
        [range(window[0] + before, window[-1] + before + 1, window.step) for window in along]
        for along, (before, _) in zip(windows, sides, strict=True)
    ]
    return _listed(build, op, x, in_padded)


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
    begins = (first[0] + i * by for i in range(len(along)))
    reach = len(first) * first.step
    if list(along) == [range(begin, begin + reach, first.step) for begin in begins]:
        return result * by + k * first.step + first[0]
    table = _table(along)
    return entry(tuple(itertools.chain(*table)), result * len(table[0]) + k)


def _table(along: Sequence[range]) -> list[list[int]]:
    """The places of each window, of which a shorter one repeats its last."""
    longest = max(map(len, along))
    return [[window[min(k, len(window) - 1)] for k in range(longest)] for window in along]


def _own_places(windows: Windows) -> torch.Tensor:
    """For each element of `_listed`: true if it is no repetition. Shape (results, window)."""
    own_in_all_dims = torch.ones([], dtype=torch.bool)
    for d, along in enumerate(windows):
        longest = max(map(len, along))
        own_places = torch.tensor([[k < len(window) for k in range(longest)] for window in along])
        own_in_all_dims = own_in_all_dims & _spread(own_places, d, len(windows))
    return own_in_all_dims


def _spread(values: torch.Tensor, dim: int, dims: int) -> torch.Tensor:
    """Values (results, window) of one of `dims` dimensions as (results of each dimension, window in
    each dimension), with sizes of 1 for the other dimensions."""
    shape = [1] * (2 * dims)
    shape[dim], shape[dims + dim] = values.shape
    return values.view(shape)


def _places_of_largest(build: Builder, op: Operator, x: Tensor, windows: Windows) -> Tensor:
    """The place of each window's largest element in the flat input. Of equal elements torch takes
    the first, but of several NaN the last."""
    elements = _listed(build, op, x, windows)
    inner, lead = _window_dims(op, elements), len(op.shape) - len(windows)
    largest = reduced(build, "argmax", elements, inner, "int64")
    if x.dtype not in RANGES:
        last = math.prod(elements.shape[d] for d in inner) - 1
        nan = build.map("isnan", [elements], elements.shape, "bool", of=x.dtype)
        mirrored = build.view(nan, nan.shape, lambda index: _mirrored(index, nan.shape, inner))
        behind = reduced(build, "argmax", build.cast(mirrored, "int32"), inner, "int64")
        last_nan = build.map("sub", [last, behind], op.shape, "int64")
        of_integers = Operator("where", (_meta(op.shape, "int64"),))
        any_nan = reduced(build, "any", nan, inner, "bool")
        largest = select(build, of_integers, any_nan, last_nan, largest)
    places = build.tensor(_flat_places(windows, x.shape[lead:]))
    result_dims = (same_index(d) for d in range(lead, len(op.shape)))
    return picked(build, places, op.shape, [*result_dims, largest])


def _mirrored(index: Indices, shape: Sequence[int], dims: Sequence[int]) -> Indices:
    """The index counted from the end along some dimensions of a tensor of this shape."""
    return tuple(i * -1 + (shape[d] - 1) if d in dims else i for d, i in enumerate(index))


def _flat_places(windows: Windows, shape: Sequence[int]) -> torch.Tensor:
    """The places of all elements of `_listed` in the flat input, of shape (results, elements)."""
    flat = torch.zeros([], dtype=torch.int64)
    for d, (along, size) in enumerate(zip(windows, shape, strict=True)):
        flat = flat * size + _spread(torch.tensor(_table(along)), d, len(windows))
    return flat.flatten(len(windows))


def _window_dims(op: Operator, elements: Tensor) -> list[int]:
    """The dimensions of a window, which come after those of the results."""
    return list(range(len(op.shape), len(elements.shape)))


def _meta(shape: Sequence[int], dtype: str) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
