"""Sums, means, extrema, norms and softmax: loops over some dimensions of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engines.exported import row_rules
from engines.lanes.index import Indices, constant
from engines.lanes.operators.pointwise import select
from engines.lanes.operators.registry import Operator, lowers, sizes
from engines.lanes.operators.views import reshape
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import Reduction, Scan
from engines.lanes.values import Tensor

_KINDS = {"amax": "max", "amin": "min", "any": "any", "all": "all", "prod": "prod"}
_OF_BOOLS = {"max": "any", "min": "all", "sum": "any", "prod": "all"}


def reduced(
    build: Builder, kind: str, x: Tensor, dims: Any, dtype: str, keep: bool = False
) -> Tensor:
    """A reduction of `x`. `kind`, `keep`: see `Reduction`; `dims`: see `reduced_dims`."""
    if dtype == "bool":
        kind = _OF_BOOLS.get(kind, kind)
    reduction: Tensor = build.add(Reduction(kind, x, reduced_dims(x, dims), dtype, keep))
    return build.total(reduction) if kind in ("sum", "prod") else reduction


def reduced_dims(x: Tensor, dims: int | Sequence[int] | None) -> list[int]:
    """The dimensions of `x` that are reduced, in order, from one dimension, several, or none for
    all. Negative ones count from the end; a tensor of rank 0 has none, but torch takes 0 and -1."""
    rank = len(x.shape)
    if isinstance(dims, int):
        dims = [dims]
    return sorted({d % rank for d in dims or range(rank)}) if rank else []


@lowers("sum", "mean", rows=row_rules.along)
def total(
    build: Builder, op: Operator, x: Tensor, /, dim: Any = None, keepdim: bool = False
) -> Tensor:
    """The sum, or the mean, along `dim`."""
    if not x.shape:
        return build.cast(x, op.dtype)
    summed = reduced(build, "sum", build.cast(x, op.dtype), dim, op.dtype, keepdim)
    if op.name == "sum":
        return summed
    # Divided, not multiplied by 1 / n, so that the mean of equal numbers is exactly that number.
    return build.map("div", [summed, x.count // max(summed.count, 1)], op.shape, op.dtype)


@lowers(*_KINDS, rows=row_rules.along)
def extremum(
    build: Builder, op: Operator, x: Tensor, /, dim: Any = None, keepdim: bool = False
) -> Tensor:
    """The extremum or the product along `dim`, or whether any or all elements are true."""
    if not x.shape:
        return build.cast(x, op.dtype)
    return reduced(build, _KINDS[op.name], build.cast(x, op.dtype), dim, op.dtype, keepdim)


@lowers("argmax", "argmin", rows=row_rules.along)
def place_of_extremum(
    build: Builder, op: Operator, x: Tensor, /, dim: int | None = None, keepdim: bool = False
) -> Tensor:
    """The index of the largest or smallest element; without `dim`, of all elements in memory
    order."""
    if dim is not None:
        return reduced(build, op.name, x, dim, "int64", keepdim)
    flat = reshape(build, _view_of(x, (x.count,)), x)
    place = reduced(build, op.name, flat, 0, "int64")
    return reshape(build, op, place) if keepdim else place


@lowers("max", "min", rows=row_rules.largest)
def extremum_with_place(
    build: Builder,
    op: Operator,
    x: Tensor,
    /,
    other: Any = None,
    dim: int | None = None,
    keepdim: bool = False,
) -> Tensor | list[Tensor]:
    """The extremum of all elements or of two tensors; or along a dimension, with its index."""
    if other is not None:
        function = {"max": "maximum", "min": "minimum"}[op.name]
        return build.map(function, [x, other], op.shape, op.dtype)
    if dim is None:
        return reduced(build, op.name, x, None, op.dtype)
    value = reduced(build, op.name, x, dim, op.dtype, keepdim)
    return [value, reduced(build, f"arg{op.name}", x, dim, "int64", keepdim)]


@lowers("var", "var_mean", rows=row_rules.along)
def variance(
    build: Builder, op: Operator, x: Tensor, /, dim: Any = None, unbiased: bool = True,
    correction: float | None = None, keepdim: bool = False,
) -> Tensor | list[Tensor]:  # fmt: skip
    """The variance, from the differences to the mean in a second pass."""
    if correction is None:
        correction = float(unbiased)
    mean, var = moments(build, x, dim, correction)
    results: list[Tensor] = [var, mean]
    if not keepdim:
        where = _zero_along(reduced_dims(x, dim), len(x.shape))
        shapes = [sizes(result) for result in op.results]
        pairs = zip(results, shapes, strict=False)  # `var` has one result only
        results = [build.view(moment, shape, where) for moment, shape in pairs]
    return results if op.name == "var_mean" else results[0]


def _zero_along(dims: Sequence[int], rank: int) -> Callable[[Indices], Indices]:
    """A function from an index without the reduced dimensions to one that has 0 in them."""

    def where(index: Indices) -> Indices:
        others = iter(index)
        return tuple(constant(0) if d in dims else next(others) for d in range(rank))

    return where


def moments(build: Builder, x: Tensor, dims: Any, correction: float) -> tuple[Tensor, Tensor]:
    """Mean and variance along `dims`, which are kept with size 1."""
    dims = reduced_dims(x, dims)
    count = math.prod(x.shape[d] for d in dims)
    summed = reduced(build, "sum", x, dims, x.dtype, True)
    mean = build.map("div", [summed, float(count)], summed.shape, x.dtype)
    deviations = build.map("sub", [x, mean], x.shape, x.dtype)
    squares = build.map("square", [deviations], x.shape, x.dtype)
    squared_sum = reduced(build, "sum", squares, dims, x.dtype, True)
    divisor = max(count - correction, 0.0)
    return mean, build.map("div", [squared_sum, divisor], squared_sum.shape, x.dtype)


@lowers("native_layer_norm")
def layer_norm(
    build: Builder,
    op: Operator,
    x: Tensor,
    shape: Sequence[int],
    weight: Any,
    bias: Any,
    eps: float,
    /,
) -> list[Tensor]:
    """Rows with mean 0 and variance 1 over the last axes; also the means and the factors."""
    dims = list(range(len(x.shape) - len(shape), len(x.shape)))
    mean, var = moments(build, x, dims, 0)
    scale = _inverse_root(build, var, eps)
    normed = build.map("sub", [x, mean], x.shape, x.dtype)
    normed = build.map("mul", [normed, scale], x.shape, x.dtype)
    return [_affine(build, normed, weight, bias), mean, scale]


@lowers("native_group_norm")
def group_norm(
    build: Builder, op: Operator, x: Tensor, weight: Any, bias: Any, n: int, channels: int,
    rest: int, groups: int, eps: float, /,
) -> list[Tensor]:  # fmt: skip
    """Groups of channels with mean 0 and variance 1; also the means and the factors."""
    shape = (n, groups, channels // groups, rest)
    grouped = reshape(build, _view_of(x, shape), x)
    mean, var = moments(build, grouped, [2, 3], 0)
    scale = _inverse_root(build, var, eps)
    normed = build.map("sub", [grouped, mean], shape, x.dtype)
    normed = build.map("mul", [normed, scale], shape, x.dtype)
    normed = reshape(build, op, normed)
    ones = [1] * (len(x.shape) - 2)  # of the dimensions behind the channels
    weight, bias = (None if w is None else w.view(-1, *ones) for w in (weight, bias))
    return [_affine(build, normed, weight, bias), mean, scale]


@lowers("_native_batch_norm_legit_no_training", rows=row_rules.batch_norm)
def batch_norm(
    build: Builder, op: Operator, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, /,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    """One fma for each element. Its constants are computed in double precision. The other results,
    of training only, are never read."""
    scale = 1 / torch.sqrt(var.double() + eps)
    if weight is not None:
        scale = scale * weight.double()
    shift = -mean.double() * scale + (0 if bias is None else bias.double())
    ones = [1] * (len(x.shape) - 2)  # of the dimensions behind the channels
    factors = [number.to(mean.dtype).view(-1, *ones) for number in (scale, shift)]
    return [build.map("fma", [x, *factors], op.shape, op.dtype), x, x]


def _inverse_root(build: Builder, var: Tensor, eps: float) -> Tensor:
    """1 / sqrt(var + eps)."""
    positive = build.map("add", [var, eps], var.shape, var.dtype)
    root = build.map("sqrt", [positive], var.shape, var.dtype)
    return build.map("div", [1.0, root], var.shape, var.dtype)


def _affine(build: Builder, x: Tensor, weight: Any, bias: Any) -> Tensor:
    """x * weight + bias; either may be None."""
    if weight is not None:
        x = build.map("mul", [x, weight], x.shape, x.dtype)
    return x if bias is None else build.map("add", [x, bias], x.shape, x.dtype)


@lowers("_softmax", "_log_softmax", rows=row_rules.along)
def softmax(build: Builder, op: Operator, x: Tensor, /, dim: int) -> Tensor:
    """The probabilities along `dim`, with one division for all of them, or their logarithms. The
    largest exponent is 0, so that no power overflows."""
    x = build.cast(x, op.dtype)
    if not x.shape:
        x = reshape(build, _view_of(x, (1,)), x)
    shape = x.shape
    largest = reduced(build, "max", x, dim, op.dtype, True)
    exponents = build.map("sub", [x, largest], shape, op.dtype)
    powers = build.map("exp", [exponents], shape, op.dtype)
    summed = reduced(build, "sum", powers, dim, op.dtype, True)
    if op.name == "_log_softmax":
        logarithm = build.map("log", [summed], summed.shape, op.dtype)
        result = build.map("sub", [exponents, logarithm], shape, op.dtype)
    else:
        inverse = build.map("div", [1.0, summed], summed.shape, op.dtype)
        result = build.map("mul", [powers, inverse], shape, op.dtype)
    return reshape(build, op, result)


@lowers("_safe_softmax", rows=row_rules.along)
def safe_softmax(build: Builder, op: Operator, x: Tensor, /, dim: int) -> Tensor:
    """As `softmax`, but 0 if all elements along `dim` are -inf."""
    is_least = build.map("eq", [x, float("-inf")], x.shape, "bool", of=x.dtype)
    all_least = reduced(build, "all", is_least, dim, "bool", True)
    probabilities = softmax(build, op, x, dim)
    return select(build, op, all_least, build.tensor(0.0, op.dtype), probabilities)


@lowers("cumsum", "cumprod", rows=row_rules.along)
def scan(build: Builder, op: Operator, x: Tensor, /, dim: int) -> Tensor:
    """The sums or products of the elements so far along `dim`."""
    if not x.shape:
        return build.cast(x, op.dtype)
    kind = {"cumsum": "sum", "cumprod": "prod"}[op.name]
    source = build.cast(x, op.dtype)
    return build.total(build.add(Scan(kind, source, dim % len(x.shape))))


@lowers("_cdist_forward", rows=row_rules.distances)
def distances(build: Builder, op: Operator, a: Any, b: Any, /, p: float) -> Tensor:
    """The Euclidean distance of each row of `a` from each row of `b`."""
    if p != 2:
        raise NotKnown(f"distances of norm {p}")
    left, right = build.tensor(a, op.dtype), build.tensor(b, op.dtype)
    shape = (*op.shape, left.shape[-1])
    rows_of_a = build.view(left, shape, lambda index: (*index[:-3], index[-3], index[-1]))
    rows_of_b = build.view(right, shape, lambda index: (*index[:-3], index[-2], index[-1]))
    differences = build.map("sub", [rows_of_a, rows_of_b], shape, op.dtype)
    squares = build.map("square", [differences], shape, op.dtype)
    summed = reduced(build, "sum", squares, -1, op.dtype)
    return build.map("sqrt", [summed], op.shape, op.dtype)


def _view_of(x: Tensor, shape: Sequence[int]) -> Operator:
    """The operator that reshapes `x` to this shape."""
    return Operator("view", (torch.empty(shape, dtype=getattr(torch, x.dtype), device="meta"),))
