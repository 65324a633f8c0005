"""Matrix products and convolutions: sums of products of two tensors' elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engines.exported import row_rules
from engines.lanes.functions import RANGES
from engines.lanes.index import Indices, constant
from engines.lanes.operators.registry import Operator, lowers
from engines.lanes.operators.views import pad
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import Assembly, Constant, Part, Product
from engines.lanes.values import Tensor

_FLOATS = ("float32", "float64")


@lowers("mm", "bmm", rows=row_rules.follow_product)
def matmul(build: Builder, op: Operator, a: Any, b: Any, /) -> Tensor:
    """The product of matrices: (…, n, k) and (…, k, m) -> (…, n, m)."""
    left, right = product_operand(build, op, a), product_operand(build, op, b)

    def left_at(index: Indices, steps: Indices) -> Indices:
        *batch_and_row, _ = index
        return (*batch_and_row, *steps)

    def right_at(index: Indices, steps: Indices) -> Indices:
        *batch, _, column = index
        return (*batch, *steps, column)

    return build.add(Product(left, right, op.shape, left.shape[-1:], left_at, right_at))


@lowers("addmm", "baddbmm", rows=row_rules.follow_product)
def addmm(
    build: Builder, op: Operator, c: Any, a: Any, b: Any, /, beta: float = 1, alpha: float = 1
) -> Tensor:
    """beta * c + alpha * (a @ b). If `beta` is 0, `c` is not read, even if it has NaN."""
    product = matmul(build, op, a, b)
    if alpha != 1:
        product = build.map("mul", [product, alpha], op.shape, op.dtype)
    if beta == 0:
        return product
    if beta != 1:
        c = build.map("mul", [c, beta], tuple(c.shape), op.dtype)
    return build.map("add", [product, c], op.shape, op.dtype)


@lowers("mv", "dot", "vdot", rows=row_rules.follow_product)
def vector_product(build: Builder, op: Operator, a: Any, b: Any, /) -> Tensor:
    """The product of a matrix and a vector, or the scalar product of two vectors."""
    left, right = product_operand(build, op, a), product_operand(build, op, b)

    def left_at(index: Indices, steps: Indices) -> Indices:
        return (*index, *steps)

    def right_at(index: Indices, steps: Indices) -> Indices:
        return steps

    return build.add(Product(left, right, op.shape, left.shape[-1:], left_at, right_at))


def product_operand(build: Builder, op: Operator, argument: Any) -> Tensor:
    """Returns an operand of a product as a tensor that can be stored in memory. Weights are there
    already. Raises NotKnown if the numbers are not float32 or float64."""
    if op.dtype not in _FLOATS:
        numbers = "integers" if op.dtype in RANGES else op.dtype
        raise NotKnown(f"a product of {numbers}")
    tensor = build.as_tensor(argument, op.dtype)
    return tensor if isinstance(tensor, Constant) else build.storable(tensor)


@lowers("convolution", "_convolution", rows=row_rules.follow_convolution)
def convolution(
    build: Builder, op: Operator, x: Any, weight: Any, bias: Any, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    groups: int, /,
) -> Tensor:  # fmt: skip
    """A convolution, or a transposed one, in any number of spatial dimensions. `bias` is None, or
    has a number for each output channel."""
    if not isinstance(weight, torch.Tensor):
        raise NotKnown("a convolution whose weights depend on the row")
    dims = len(x.shape) - 2
    sizes = Sizes(*(number_per_dim(numbers, dims) for numbers in (stride, padding, dilation)))
    x = build.as_tensor(x, op.dtype)
    convolve = _convolve_transposed if transposed else _convolve
    convolved = convolve(build, op, x, weight, sizes, groups)
    if bias is None:
        return convolved
    biases: Tensor = build.as_tensor(bias, op.dtype)
    biases = build.view(biases, (biases.count, *[1] * dims), lambda index: index[:1])
    return build.map("add", [convolved, biases], op.shape, op.dtype)


@dataclass(frozen=True)
class Sizes:
    """The stride, padding and dilation of a convolution: a number for each spatial dimension."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]


def number_per_dim(numbers: int | Sequence[int], dims: int) -> list[int]:
    """A list of a number for each of `dims` spatial dimensions. A single number, as torch takes it,
    is that of all dimensions."""
    numbers = [numbers] if isinstance(numbers, int) else list(numbers)
    return numbers * dims if len(numbers) == 1 else numbers


def _convolve(
    build: Builder, op: Operator, x: Tensor, weight: torch.Tensor, sizes: Sizes, groups: int
) -> Tensor:
    """A convolution, as a Product whose sums run over the positions in the kernel and, innermost,
    over the channels of a group. `groups`: see torch.nn.Conv2d."""
    if any(sizes.padding):
        x = pad_spatial(build, x, [(width, width) for width in sizes.padding])
    source = product_operand(build, op, x)
    source.innermost = 1  # the channels, which the last loop of a sum runs over
    # The number of channels in a group, of the input and of the result.
    inputs, results = weight.shape[1], weight.shape[0] // groups

    def left_at(index: Indices, steps: Indices) -> Indices:
        *offsets, channel = steps
        spatial = zip(index[2:], sizes.stride, offsets, sizes.dilation, strict=True)
        positions = [i * stride + k * dilation for i, stride, k, dilation in spatial]
        group = index[1] // results if groups > 1 else constant(0)
        return (index[0], channel + group * inputs, *positions)

    def right_at(index: Indices, steps: Indices) -> Indices:
        *offsets, channel = steps
        return (index[1], channel, *offsets)

    right, steps = build.as_tensor(weight, op.dtype), (*weight.shape[2:], inputs)
    return build.add(Product(source, right, op.shape, steps, left_at, right_at))


def _convolve_transposed(
    build: Builder, op: Operator, x: Tensor, weight: torch.Tensor, sizes: Sizes, groups: int
) -> Tensor:
    """A transposed convolution, as ordinary convolutions without stride, whose results are
    interleaved: one for each phase, which is the position of a result modulo the stride."""
    pairs = zip(sizes.stride, sizes.dilation, strict=True)
    if any(stride > 1 and dilation > 1 for stride, dilation in pairs):
        raise NotKnown("a transposed convolution with stride and dilation")
    # Input and output channels change places: (channels of results, channels of a group, …).
    swapped = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    phases = itertools.product(*map(range, sizes.stride))
    phase_parts = [_phase_part(build, op, x, swapped, sizes, groups, phase) for phase in phases]
    parts = [part for part in phase_parts if part is not None]
    if len(parts) == 1 and parts[0].source.shape == op.shape:
        return parts[0].source
    if sum(part.source.count for part in parts) != math.prod(op.shape):  # some results are 0
        zeros = build.expand(build.as_tensor(0, op.dtype), op.shape)
        parts.insert(0, Part(zeros, lambda index: index))
    return build.add(Assembly(build.values, op.shape, op.dtype, parts))


def _phase_part(
    build: Builder, op: Operator, x: Tensor, weight: torch.Tensor, sizes: Sizes, groups: int,
    phase: Sequence[int],
) -> Part | None:  # fmt: skip
    """The results of a transposed convolution at one phase, as a part of all results; None if there
    are none. They are sums over the taps: each `stride`-th element of the kernel, from `phase` on.
    """
    dims = range(len(phase))
    tap_slices: tuple[Any, ...] = tuple(slice(phase[d], None, sizes.stride[d]) for d in dims)
    taps = weight[(..., *tap_slices)]
    spans = [
        _Span.of(
            phase=phase[d],
            stride=sizes.stride[d],
            padding=sizes.padding[d],
            results=op.shape[2 + d],
            reach=sizes.dilation[d] * (taps.shape[2 + d] - 1),
            size=x.shape[2 + d],
        )
        for d in dims
    ]
    if any(span.count < 1 for span in spans):
        return None
    padded = pad_spatial(build, x, [(span.before, span.behind) for span in spans])
    shape = (*op.shape[:2], *(span.count for span in spans))
    mirrored = taps.flip([2 + d for d in dims])  # the last tap meets the first element of a sum
    plain = Sizes(stride=[1] * len(dims), padding=[0] * len(dims), dilation=sizes.dilation)
    convolution_of_phase = Operator.of("convolution", shape, op.dtype)
    source = _convolve(build, convolution_of_phase, padded, mirrored, plain, groups)
    return Part(source, _index_of_phase([span.first for span in spans], sizes.stride))


@dataclass(frozen=True)
class _Span:
    """The results of one phase along one dimension.

    first, count : the position of the first of them among all results, and their number.
    before, behind : the number of zeros that their sums need before and behind the input. A
        negative number counts the elements there that they do not need.
    """

    first: int
    count: int
    before: int
    behind: int

    @classmethod
    def of(
        cls, *, phase: int, stride: int, padding: int, results: int, reach: int, size: int
    ) -> _Span:
        """The span of a phase. `size` is that of the input x, `results` that of all results.

        The result at position p of this phase sums the elements from x[q - reach] to x[q], where
        q = (p + padding - phase) / stride is an integer.
        """
        offset = padding - phase
        # 0 <= p <= results - 1, so offset <= stride * q <= results - 1 + offset.
        least_q = -(-offset // stride)  # rounded up
        most_q = (results - 1 + offset) // stride
        first, count = stride * least_q - offset, most_q - least_q + 1
        return cls(first, count, before=reach - least_q, behind=most_q - (size - 1))


def _index_of_phase(first: Sequence[int], strides: Sequence[int]) -> Callable[[Indices], Indices]:
    """A function from the index among the results of a phase to that among all results, of which
    they are each `stride`-th one from `first` on, in each spatial dimension."""

    def place(index: Indices) -> Indices:
        spatial = zip(index[2:], strides, first, strict=True)
        return (*index[:2], *(i * stride + begin for i, stride, begin in spatial))

    return place


def pad_spatial(
    build: Builder, x: Tensor, sides: Sequence[tuple[int, int]], value: float = 0
) -> Tensor:
    """Returns `x` with `value` around it. `sides` has the widths (before, behind) for each spatial
    dimension, which are the last ones of `x`. Negative widths cut elements off."""
    if not any(map(any, sides)):
        return x
    lead = len(x.shape) - len(sides)
    spatial = zip(x.shape[lead:], sides, strict=True)
    shape = [*x.shape[:lead], *(size + before + behind for size, (before, behind) in spatial)]
    last_dim_first = [width for pair in reversed(sides) for width in pair]
    return pad(build, Operator.of("constant_pad_nd", shape, x.dtype), x, last_dim_first, value)
