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


@lowers("mm", "bmm", rows=row_rules.product)
def matmul(build: Builder, op: Operator, a: Any, b: Any, /) -> Tensor:
    """A product of matrices, along the last axis of `a` and the last but one of `b`."""
    left, right = operand(build, op, a), operand(build, op, b)

    def left_at(index: Indices, steps: Indices) -> Indices:
        *batch_and_row, _ = index
        return (*batch_and_row, *steps)

    def right_at(index: Indices, steps: Indices) -> Indices:
        *batch, _, column = index
        return (*batch, *steps, column)

    return build.add(Product(left, right, op.shape, left.shape[-1:], left_at, right_at))


@lowers("addmm", "baddbmm", rows=row_rules.product)
def addmm(
    build: Builder, op: Operator, c: Any, a: Any, b: Any, /, beta: float = 1, alpha: float = 1
) -> Tensor:
    """A product of matrices and a tensor, each with a factor."""
    product = matmul(build, op, a, b)
    if alpha != 1:
        product = build.map("mul", [product, alpha], op.shape, op.dtype)
    if beta == 0:
        return product
    if beta != 1:
        c = build.map("mul", [c, beta], tuple(c.shape), op.dtype)
    return build.map("add", [product, c], op.shape, op.dtype)


@lowers("mv", "dot", "vdot", rows=row_rules.product)
def vector(build: Builder, op: Operator, a: Any, b: Any, /) -> Tensor:
    """A product of a matrix, or of a vector, and a vector."""
    left, right = operand(build, op, a), operand(build, op, b)

    def left_at(index: Indices, steps: Indices) -> Indices:
        return (*index, *steps)

    def right_at(index: Indices, steps: Indices) -> Indices:
        return steps

    return build.add(Product(left, right, op.shape, left.shape[-1:], left_at, right_at))


def operand(build: Builder, op: Operator, argument: Any) -> Tensor:
    """An operand of a product: weights as they are; other tensors are stored in memory. NotKnown
    if the product is not of floats."""
    if op.dtype not in _FLOATS:
        numbers = "integers" if op.dtype in RANGES else op.dtype
        raise NotKnown(f"a product of {numbers}")
    tensor = build.tensor(argument, op.dtype)
    return tensor if isinstance(tensor, Constant) else build.in_memory(tensor)


@lowers("convolution", "_convolution", rows=row_rules.convolved)
def convolution(
    build: Builder, op: Operator, x: Any, weight: Any, bias: Any, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    groups: int, /,
) -> Tensor:  # fmt: skip
    """A convolution, or a transposed one, with a bias for each output channel."""
    if not isinstance(weight, torch.Tensor):
        raise NotKnown("a convolution whose weights depend on the row")
    dims = len(x.shape) - 2
    stride, padding, dilation = (per_dim(numbers, dims) for numbers in (stride, padding, dilation))
    x = build.tensor(x, op.dtype)
    convolve = _transposed if transposed else _ordinary
    convolved = convolve(build, op, x, weight, Sizes(stride, padding, dilation), groups)
    if bias is None:
        return convolved
    added: Tensor = build.tensor(bias, op.dtype)
    added = build.view(added, (added.count, *[1] * dims), lambda index: index[:1])
    return build.map("add", [convolved, added], op.shape, op.dtype)


@dataclass(frozen=True)
class Sizes:
    """The parameters of a convolution: a number for each spatial dimension."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]


def per_dim(numbers: int | Sequence[int], dims: int) -> list[int]:
    """A number for each spatial dimension: torch also takes a single one for all of them."""
    numbers = [numbers] if isinstance(numbers, int) else list(numbers)
    return numbers * dims if len(numbers) == 1 else numbers


def _ordinary(
    build: Builder, op: Operator, x: Tensor, weight: torch.Tensor, sizes: Sizes, groups: int
) -> Tensor:
    """A convolution as a product over the places of the kernel and the channels of a group."""
    if any(sizes.padding):
        x = padded(build, x, [(p, p) for p in sizes.padding])
    source = operand(build, op, x)
    source.innermost = 1  # the channels, which the last loop of a sum runs over
    # Channels of a group: of the input, and of the result.
    inputs, results = weight.shape[1], weight.shape[0] // groups

    def left_at(index: Indices, steps: Indices) -> Indices:
        *offsets, channel = steps
        spatial = zip(index[2:], sizes.stride, offsets, sizes.dilation, strict=True)
        places = [i * stride + k * dilation for i, stride, k, dilation in spatial]
        group = index[1] // results if groups > 1 else constant(0)
        return (index[0], channel + group * inputs, *places)

    def right_at(index: Indices, steps: Indices) -> Indices:
        *offsets, channel = steps
        return (index[1], channel, *offsets)

    right, steps = build.tensor(weight, op.dtype), (*weight.shape[2:], inputs)
    return build.add(Product(source, right, op.shape, steps, left_at, right_at))


def _transposed(
    build: Builder, op: Operator, x: Tensor, weight: torch.Tensor, sizes: Sizes, groups: int
) -> Tensor:
    """A transposed convolution, as one ordinary convolution without stride for each phase (the
    position of a result modulo the stride). Their results are interleaved."""
    strides = list(sizes.stride)
    if any(by > 1 and apart > 1 for by, apart in zip(strides, sizes.dilation, strict=True)):
        raise NotKnown("a transposed convolution with stride and dilation")
    # Input and output channels change places: (channels of results, channels of a group, …).
    turned = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    phases = itertools.product(*(range(stride) for stride in strides))
    phase_parts = [_phase(build, op, x, turned, sizes, groups, phase) for phase in phases]
    parts = [part for part in phase_parts if part is not None]
    if len(parts) == 1 and parts[0].source.shape == op.shape:
        return parts[0].source
    zeros = build.expand(build.tensor(0, op.dtype), op.shape)
    covered = sum(part.source.count for part in parts) == math.prod(op.shape)
    parts = parts if covered else [Part(zeros, lambda index: index), *parts]
    return build.add(Assembly(build.values, op.shape, op.dtype, parts))


def _phase(
    build: Builder, op: Operator, x: Tensor, weight: torch.Tensor, sizes: Sizes, groups: int,
    phase: Sequence[int],
) -> Part | None:  # fmt: skip
    """The results of a transposed convolution at one phase; None if there are none. Only each
    `stride`-th element of the kernel, from `phase` on, meets them, in reverse order."""
    dims = range(len(phase))
    of_phase: tuple[Any, ...] = tuple(slice(phase[d], None, sizes.stride[d]) for d in dims)
    taps = weight[(..., *of_phase)]
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
    room = padded(build, x, [(span.before, span.behind) for span in spans])
    shape = (*op.shape[:2], *(span.count for span in spans))
    result = torch.empty(shape, dtype=op.results[0].dtype, device="meta")
    mirrored = taps.flip([2 + d for d in dims])
    plain = Sizes([1] * len(dims), [0] * len(dims), sizes.dilation)
    source = _ordinary(build, Operator("convolution", (result,)), room, mirrored, plain, groups)
    return Part(source, _interleaved([span.first for span in spans], sizes.stride))


@dataclass(frozen=True)
class _Span:
    """Along one dimension: the `count` results of one phase, of which `first` is the first. Their
    sums need `before` and `behind` zeros around the input; negative: elements that are not used."""

    first: int
    count: int
    before: int
    behind: int

    @classmethod
    def of(
        cls, *, phase: int, stride: int, padding: int, results: int, reach: int, size: int
    ) -> _Span:
        """The span of a phase. With q = (o + padding - phase) / stride, which is whole for the
        results `o` of the phase, `o` sums elements from x[q - reach] to x[q]. `size`: of x."""
        offset = padding - phase  # 0 <= o <= results - 1, so offset <= stride * q
        least = -(-offset // stride)  # offset / stride, rounded up
        most = (results - 1 + offset) // stride
        first = stride * least - offset
        return cls(first, most - least + 1, reach - least, most - (size - 1))


def _interleaved(first: Sequence[int], by: Sequence[int]) -> Callable[[Indices], Indices]:
    """Where the results of a phase lie: at each `by`-th place from `first` on, in each spatial
    dimension."""

    def place(index: Indices) -> Indices:
        spatial = zip(index[2:], by, first, strict=True)
        return (*index[:2], *(i * stride + begin for i, stride, begin in spatial))

    return place


def padded(build: Builder, x: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
    """`x` with (before, behind) zeros in each spatial dimension; negative numbers cut off."""
    if not any(map(any, sides)):
        return x
    last_dim_first = [side for pair in reversed(sides) for side in pair]
    shape = [*x.shape[:2], *(n + a + b for n, (a, b) in zip(x.shape[2:], sides, strict=True))]
    result = torch.empty(shape, dtype=getattr(torch, x.dtype), device="meta")
    return pad(build, Operator("constant_pad_nd", (result,)), x, last_dim_first)
