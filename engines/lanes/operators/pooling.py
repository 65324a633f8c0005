"""Pooling: reductions over windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from engines.exported import row_rules
from engines.lanes.functions import RANGES
from engines.lanes.index import Index, Indices, entry
from engines.lanes.operators.pointwise import divide, select
from engines.lanes.operators.products import number_per_dim, pad_spatial
from engines.lanes.operators.reductions import add_reduction
from engines.lanes.operators.registry import Operator, lowers
from engines.lanes.operators.selection import pick_elements, same_index
from engines.lanes.tensor_builder import Builder
from engines.lanes.values import Tensor

Windows = list[list[range]]
"""For each spatial dimension, the positions in the input that each window covers. A window may hang
over an edge of the input: positions in its padding are negative or too large."""


@lowers("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices",
        rows=row_rules.follow_pooling)  # fmt: skip
def max_pool(
    build: Builder, op: Operator, x: Tensor, /, kernel_size: Sequence[int],
    stride: Sequence[int] = (), padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,),
) -> list[Tensor]:  # fmt: skip
    """The largest element of each window, and its index among all elements of the channel."""
    windows = _make_windows(op, kernel_size, stride or kernel_size, padding, dilation)
    elements = _window_elements(build, op, x, windows, _least(x))
    return [
        add_reduction(build, "max", elements, _window_dims(op, elements), op.dtype),
        _positions_of_largest(build, op, x, _clip_to_input(windows, x)),
    ]


@lowers("avg_pool1d", "avg_pool2d", "avg_pool3d", rows=row_rules.follow_pooling)
def mean_pool(
    build: Builder, op: Operator, x: Tensor, /, kernel_size: Sequence[int],
    stride: Sequence[int] = (), padding: Sequence[int] = (0,), count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """The mean of each window: the sum divided by `divisor_override`, or if that is None by the
    number of elements. The padding counts as elements if `count_include_pad`; what hangs over the
    padding never does."""
    windows = _make_windows(op, kernel_size, stride or kernel_size, padding, dilation=(1,))
    elements = _window_elements(build, op, x, windows, outside=0)
    summed = add_reduction(build, "sum", elements, _window_dims(op, elements), op.dtype)
    if divisor_override is not None:
        return _divide(build, op, summed, divisor_override)
    counted = number_per_dim(padding, len(windows)) if count_include_pad else None
    return _divide(build, op, summed, _window_sizes(_clip_to_input(windows, x, counted)))


@lowers("adaptive_max_pool2d", "adaptive_max_pool3d", rows=row_rules.follow_pooling)
def adaptive_max_pool(build: Builder, op: Operator, x: Tensor, /) -> list[Tensor]:
    """The largest element of each of the windows that cover the input, and its index among all
    elements of the channel."""
    windows = _make_adaptive_windows(op, x)
    elements = _list_elements(build, op, x, windows)
    return [
        add_reduction(build, "max", elements, _window_dims(op, elements), op.dtype),
        _positions_of_largest(build, op, x, windows),
    ]


@lowers("_adaptive_avg_pool3d", rows=row_rules.follow_pooling)
def adaptive_mean_pool(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    """The mean of each of the windows that cover the input. A window's repeated elements (see
    `_list_elements`) are set to 0 before the sum."""
    windows = _make_adaptive_windows(op, x)
    elements = _list_elements(build, op, x, windows)
    lead = len(op.shape) - len(windows)
    mask = _own_element_mask(windows).view(*[1] * lead, *elements.shape[lead:])
    of_elements = Operator.of("where", elements.shape, x.dtype)
    is_own, zero = build.as_tensor(mask), build.as_tensor(0, op.dtype)
    elements = select(build, of_elements, is_own, elements, zero)
    summed = add_reduction(build, "sum", elements, _window_dims(op, elements), op.dtype)
    return _divide(build, op, summed, _window_sizes(windows))


def _divide(build: Builder, op: Operator, summed: Tensor, by: int | torch.Tensor) -> Tensor:
    """The quotient of the sums by a number, or by one for each window. Integers are rounded towards
    zero."""
    mode = "trunc" if op.dtype in RANGES else None
    return divide(build, op, summed, by, rounding_mode=mode)


def _make_windows(
    op: Operator, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> Windows:  # fmt: skip
    """The windows of a pooling operator, with all positions that they cover. Each of the arguments
    has a number for each pooled dimension, or one for all of them."""
    dims = _pooled_dims(op)
    kernel, stride, padding, dilation = (
        number_per_dim(sizes, dims) for sizes in (kernel, stride, padding, dilation)
    )
    windows = []
    for d, results in enumerate(op.shape[-dims:]):
        begins = range(-padding[d], results * stride[d] - padding[d], stride[d])
        reach = kernel[d] * dilation[d]
        windows.append([range(begin, begin + reach, dilation[d]) for begin in begins])
    return windows


def _make_adaptive_windows(op: Operator, x: Tensor) -> Windows:
    """The windows of an adaptive pooling operator: they cover the input and have nearly equal
    sizes. Window i begins at i * size / results, rounded down, and ends before
    (i + 1) * size / results, rounded up."""
    dims = _pooled_dims(op)
    return [
        [range(i * size // results, -(-(i + 1) * size // results)) for i in range(results)]
        for size, results in zip(x.shape[-dims:], op.shape[-dims:], strict=True)
    ]


def _pooled_dims(op: Operator) -> int:
    """The number of dimensions that are pooled: the last ones, after the batch and the channels."""
    return next(d for d in (1, 2, 3) if f"{d}d" in op.name)


def _clip_to_input(windows: Windows, x: Tensor, room: Sequence[int] | None = None) -> Windows:
    """The windows without the positions outside the input. If `room` is given, so many positions
    more count as inside, at both ends of each dimension."""
    sizes = x.shape[-len(windows) :]
    return [
        [_clip(window, begin=-more, end=size + more) for window in along]
        for along, size, more in zip(windows, sizes, room or [0] * len(sizes), strict=True)
    ]


def _clip(window: range, begin: int, end: int) -> range:
    """The positions of a window from `begin` to `end` - 1. If there are none, it is the first one
    behind: eager torch names that as the place of the largest."""
    after = [position for position in window if position >= begin]
    positions = [position for position in after if position < end] or after[:1]
    return range(positions[0], positions[-1] + 1, window.step)


def _window_sizes(windows: Windows) -> torch.Tensor:
    """The number of positions in each window, as floats, of shape (results in each dimension)."""
    counts = torch.ones([])
    for along in windows:
        counts = counts.unsqueeze(-1) * torch.tensor([float(len(window)) for window in along])
    return counts


def _least(x: Tensor) -> float:
    """The least number of the dtype of `x`."""
    return RANGES[x.dtype][0] if x.dtype in RANGES else float("-inf")


def _window_elements(
    build: Builder, op: Operator, x: Tensor, windows: Windows, outside: float
) -> Tensor:
    """The elements of windows as `_list_elements` gives them, also of windows that hang over an
    edge of the input: positions outside it have the value `outside`."""
    lead = len(x.shape) - len(windows)
    sides = [
        (max(-along[0][0], 0), max(max(window[-1] for window in along) + 1 - size, 0))
        for along, size in zip(windows, x.shape[lead:], strict=True)
    ]
    x = pad_spatial(build, x, sides, outside)
    in_padded = [
        [range(window[0] + before, window[-1] + before + 1, window.step) for window in along]
        for along, (before, _) in zip(windows, sides, strict=True)
    ]
    return _list_elements(build, op, x, in_padded)


def _list_elements(build: Builder, op: Operator, x: Tensor, windows: Windows) -> Tensor:
    """A view of the elements of windows that lie inside the input, of shape (…, results, longest
    window). A shorter window repeats its last element."""
    dims, lead = len(windows), len(x.shape) - len(windows)

    def where(index: Indices) -> Indices:
        results, inside = index[lead : lead + dims], index[lead + dims :]
        return (*index[:lead], *map(_position_of_element, windows, results, inside))

    return build.view(x, (*op.shape, *(len(_position_table(along)[0]) for along in windows)), where)


def _position_of_element(along: Sequence[range], result: Index, k: Index) -> Index:
    """The position of element `k` in window `result` of one dimension, as an index. It is a plain
    sum if the windows have equal sizes and distances, else an entry of a table."""
    first = along[0]
    stride = along[-1][0] - along[-2][0] if len(along) > 1 else 0
    begins = (first[0] + i * stride for i in range(len(along)))
    reach = len(first) * first.step
    if list(along) == [range(begin, begin + reach, first.step) for begin in begins]:
        return result * stride + k * first.step + first[0]
    table = _position_table(along)
    return entry(tuple(itertools.chain(*table)), result * len(table[0]) + k)


def _position_table(along: Sequence[range]) -> list[list[int]]:
    """The positions of each window of one dimension, in lists of equal lengths: a shorter window
    repeats its last position."""
    longest = max(map(len, along))
    return [[window[min(k, len(window) - 1)] for k in range(longest)] for window in along]


def _own_element_mask(windows: Windows) -> torch.Tensor:
    """A mask of shape (results, window), which is false for each element of `_list_elements` that
    repeats another one."""
    is_own = torch.ones([], dtype=torch.bool)
    for d, along in enumerate(windows):
        longest = max(map(len, along))
        own_along = torch.tensor([[k < len(window) for k in range(longest)] for window in along])
        is_own = is_own & _spread(own_along, d, len(windows))
    return is_own


def _spread(values: torch.Tensor, dim: int, dims: int) -> torch.Tensor:
    """Values of shape (results, window) along one of `dims` dimensions, in a shape that broadcasts
    to (results in each dimension, window in each dimension): of dimension 1 of 2, (r, w) -> (1, r,
    1, w)."""
    shape = [1] * (2 * dims)
    shape[dim], shape[dims + dim] = values.shape
    return values.view(shape)


def _positions_of_largest(build: Builder, op: Operator, x: Tensor, windows: Windows) -> Tensor:
    """The position of each window's largest element among all elements of its channel. Of equal
    elements torch takes the first, but of several NaN the last."""
    elements = _window_elements(build, op, x, windows, _least(x))
    inner, lead = _window_dims(op, elements), len(op.shape) - len(windows)
    largest = add_reduction(build, "argmax", elements, inner, "int64")
    if x.dtype not in RANGES:
        last = math.prod(elements.shape[d] for d in inner) - 1
        # The last NaN is the first one if the elements are in reverse order.
        nan = build.map("isnan", [elements], elements.shape, "bool", cast_to=x.dtype)
        mirrored = build.view(nan, nan.shape, lambda index: _mirror_index(index, nan.shape, inner))
        from_end = add_reduction(build, "argmax", build.cast(mirrored, "int32"), inner, "int64")
        last_nan = build.map("sub", [last, from_end], op.shape, "int64")
        of_integers = Operator.of("where", op.shape, "int64")
        any_nan = add_reduction(build, "any", nan, inner, "bool")
        largest = select(build, of_integers, any_nan, last_nan, largest)
    positions = build.as_tensor(_flat_positions(windows, x.shape[lead:]))
    result_dims = (same_index(d) for d in range(lead, len(op.shape)))
    return pick_elements(build, positions, op.shape, [*result_dims, largest])


def _mirror_index(index: Indices, shape: Sequence[int], dims: Sequence[int]) -> Indices:
    """The index of the same element if a tensor of this shape is reversed along `dims`: i becomes
    size - 1 - i."""
    return tuple(i * -1 + (shape[d] - 1) if d in dims else i for d, i in enumerate(index))


def _flat_positions(windows: Windows, shape: Sequence[int]) -> torch.Tensor:
    """The positions of all elements of `_list_elements` among all elements of a channel, of shape
    (results, elements of a window). `shape`: the sizes of the pooled dimensions of the input."""
    flat = torch.zeros([], dtype=torch.int64)
    for d, (along, size) in enumerate(zip(windows, shape, strict=True)):
        flat = flat * size + _spread(torch.tensor(_position_table(along)), d, len(windows))
    return flat.flatten(len(windows))


def _window_dims(op: Operator, elements: Tensor) -> list[int]:
    """The dimensions of a window in a tensor of elements, after those of the results."""
    return list(range(len(op.shape), len(elements.shape)))
