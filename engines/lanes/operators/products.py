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
    """A product of a matrix and a vector."""
    left, right = operand(build, op, a), operand(build, op, b)
    return build.add(
        Product(
            left,
            right,
            op.shape,
            left.shape[-1:],
            lambda index, steps: (*index, *steps),
            lambda index, steps: steps,
        )
    )


def operand(build: Builder, op: Operator, given: Any) -> Tensor:
    """An operand of a product: weights as they are; other tensors are stored in memory."""
    if op.dtype not in _FLOATS:
        what = "integers" if op.dtype in RANGES else op.dtype
        raise NotKnown(f"a product of {what}")
    tensor = build.tensor(given, op.dtype)
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
    stride, padding, dilation = (
        list(each) * (dims if len(each) == 1 else 1) for each in (stride, padding, dilation)
    )
    x = build.tensor(x, op.dtype)
    if transposed:
        convolved = _transposed(build, op, x, weight, Sizes(stride, padding, dilation), groups)
    else:
        convolved = _ordinary(build, op, x, weight, Sizes(stride, padding, dilation), groups)
    if bias is None:
        return convolved
    each = build.tensor(bias, op.dtype)
    each = build.view(each, (each.count, *[1] * dims), lambda index: index[:1])
    return build.map("add", [convolved, each], op.shape, op.dtype)


@dataclass(frozen=True)
class Sizes:
    """The parameters of a convolution: a number for each spatial dimension."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]


def _ordinary(
    build: Builder, op: Operator, x: Tensor, weight: torch.Tensor, sizes: Sizes, groups: int
) -> Tensor:
    """A convolution as a product over the places of the kernel and the channels of a group."""
    if any(sizes.padding):
        x = padded(build, x, [(p, p) for p in sizes.padding])
    source = operand(build, op, x)
    source.innermost = 1
    inner, outer = weight.shape[1], weight.shape[0] // groups

    def left_at(index: Indices, steps: Indices) -> Indices:
        *offsets, channel = steps
        places = [
            i * by + k * apart
            for i, by, k, apart in zip(
                index[2:], sizes.stride, offsets, sizes.dilation, strict=True
            )
        ]
        group = index[1] // outer if groups > 1 else constant(0)
        return (index[0], channel + group * inner, *places)

    def right_at(index: Indices, steps: Indices) -> Indices:
        *offsets, channel = steps
        return (index[1], channel, *offsets)

    product = Product(
        source, build.tensor(weight, op.dtype), op.shape, (*weight.shape[2:], inner),
        left_at, right_at,
    )  # fmt: skip
    return build.add(product)


def _transposed(
    build: Builder, op: Operator, x: Tensor, weight: torch.Tensor, sizes: Sizes, groups: int
) -> Tensor:
    """A transposed convolution, as one ordinary convolution without stride for each phase (the
    position of a result modulo the stride). Their results are interleaved."""
    strides = list(sizes.stride)
    if any(by > 1 and apart > 1 for by, apart in zip(strides, sizes.dilation, strict=True)):
        raise NotKnown("a transposed convolution with stride and dilation")
    whole = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)  # outer, inner, …
    parts = []
    for phases in itertools.product(*(range(by) for by in strides)):
        taps = whole[
            (..., *(slice(phase, None, by) for phase, by in zip(phases, strides, strict=True)))
        ]
        spans = [
            _Span.of(
                phase=phases[d],
                stride=strides[d],
                padding=sizes.padding[d],
                results=op.shape[2 + d],
                reach=sizes.dilation[d] * (taps.shape[2 + d] - 1),
                size=x.shape[2 + d],
            )
            for d in range(len(strides))
        ]
        if any(span.count < 1 for span in spans):
            continue
        room = padded(build, x, [(span.before, span.behind) for span in spans])
        shape = (*op.shape[:2], *(span.count for span in spans))
        result = torch.empty(shape, dtype=op.results[0].dtype, device="meta")
        mirrored = taps.flip(list(range(2, taps.dim())))
        plain = Sizes([1] * len(spans), [0] * len(spans), sizes.dilation)
        part = _ordinary(build, Operator("convolution", (result,)), room, mirrored, plain, groups)
        parts.append(Part(part, _apart([span.first for span in spans], strides)))
    if len(parts) == 1 and parts[0].source.shape == op.shape:
        return parts[0].source
    zeros = build.expand(build.tensor(0, op.dtype), op.shape)
    covered = sum(part.source.count for part in parts) == math.prod(op.shape)
    parts = parts if covered else [Part(zeros, lambda index: index), *parts]
    return build.add(Assembly(build.values, op.shape, op.dtype, parts))


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


def _apart(first: Sequence[int], by: Sequence[int]) -> Callable[[Indices], Indices]:
    def place(index: Indices) -> Indices:
        moved = [i * op + at for i, op, at in zip(index[2:], by, first, strict=True)]
        return (*index[:2], *moved)

    return place


def padded(build: Builder, x: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
    """`x` with (before, behind) zeros in each spatial dimension; negative numbers cut off."""
    if not any(map(any, sides)):
        return x
    flat = [side for pair in reversed(sides) for side in pair]
    shape = [*x.shape[:2], *(n + a + b for n, (a, b) in zip(x.shape[2:], sides, strict=True))]
    result = torch.empty(shape, dtype=getattr(torch, x.dtype), device="meta")
    return pad(build, Operator("constant_pad_nd", (result,)), x, flat)
