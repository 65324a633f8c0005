"""Sums, means, extrema, norms and softmax: loops over some dimensions of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engines.exported import row_rules
from engines.lanes.index import Indices, constant
from engines.lanes.operators.pointwise import select
from engines.lanes.operators.registry import Operator, lowers, shape_of
from engines.lanes.operators.views import reshape
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import Reduction, Scan
from engines.lanes.values import Tensor

# Operators of ATen, and the kinds of reduction that they are.
_KINDS = {"amax": "max", "amin": "min", "any": "any", "all": "all", "prod": "prod"}
# The kinds that other kinds are for bools.
_OF_BOOLS = {"max": "any", "min": "all", "sum": "any", "prod": "all"}


def add_reduction(
    build: Builder, kind: str, x: Tensor, dims: Any, dtype: str, keep: bool = False
) -> Tensor:
    """Adds a reduction of `x` to the program, and returns it rounded to `dtype`. For `kind` and
    `keep` see `Reduction`, for `dims` see `normalize_dims`."""
    if dtype == "bool":
        kind = _OF_BOOLS.get(kind, kind)
    elif x.dtype == "bool":  # true is -1 in a register, and the least number
        x = build.cast(x, "uint8")
    reduction: Tensor = build.add(Reduction(kind, x, normalize_dims(x, dims), dtype, keep))
    return build.round_sums(reduction) if kind in ("sum", "prod") else reduction


def normalize_dims(x: Tensor, dims: int | Sequence[int] | None) -> list[int]:
    """The dimensions of `x` to reduce, in ascending order and not negative. `dims` is one dimension
    or several; negative ones count from the end; None or an empty list means all of them.

    For a tensor of rank 0 the result is empty, whatever `dims` is: torch allows 0 and -1 there.
    """
    rank = len(x.shape)
    if isinstance(dims, int):
        dims = [dims]
    return sorted({d % rank for d in dims or range(rank)}) if rank else []


@lowers("sum", "mean", rows=row_rules.follow_along_dims)
def sum_or_mean(
    build: Builder, op: Operator, x: Tensor, /, dim: Any = None, keepdim: bool = False
) -> Tensor:
    """The sum or the mean along `dim`, which may be several dimensions; None means all."""
    if not x.shape:
        return build.cast(x, op.dtype)
    summed = add_reduction(build, "sum", build.cast(x, op.dtype), dim, op.dtype, keepdim)
    if op.name == "sum":
        return summed
    terms = x.count // max(summed.count, 1)  # of each sum
    # Divided, not multiplied by 1 / n, so that the mean of equal numbers is exactly that number.
    return build.map("div", [summed, terms], op.shape, op.dtype)


@lowers(*_KINDS, rows=row_rules.follow_along_dims)
def extremum_or_product(
    build: Builder, op: Operator, x: Tensor, /, dim: Any = None, keepdim: bool = False
) -> Tensor:
    """The largest or smallest element along `dim`, the product, or whether any or all elements are
    true. `dim` may be several dimensions; None means all."""
    dtype = "bool" if op.name in ("any", "all") else op.dtype  # torch's are uint8 for uint8
    x = build.cast(x, dtype)
    if not x.shape:
        return build.cast(x, op.dtype)
    reduced = add_reduction(build, _KINDS[op.name], x, dim, dtype, keepdim)
    return build.cast(reduced, op.dtype)


@lowers("argmax", "argmin", rows=row_rules.follow_along_dims)
def argmax_or_argmin(
    build: Builder, op: Operator, x: Tensor, /, dim: int | None = None, keepdim: bool = False
) -> Tensor:
    """The index of the largest or smallest element along `dim`. If `dim` is None, it is the index
    among all elements, in the order in which they are in memory."""
    if dim is not None:
        return add_reduction(build, op.name, x, dim, "int64", keepdim)
    flat = reshape(build, Operator.of("view", (x.count,), x.dtype), x)
    position = add_reduction(build, op.name, flat, 0, "int64")
    return reshape(build, op, position) if keepdim else position


@lowers("max", "min", rows=row_rules.follow_max)
def max_or_min(
    build: Builder,
    op: Operator,
    x: Tensor,
    /,
    other: Any = None,
    dim: int | None = None,
    keepdim: bool = False,
) -> Tensor | list[Tensor]:
    """With `other`, the larger or smaller one of each pair of elements. With `dim`, the largest or
    smallest element along it, and its index. With neither, the largest or smallest of all elements.
    """
    if other is not None:
        function = {"max": "maximum", "min": "minimum"}[op.name]
        return build.map(function, [x, other], op.shape, op.dtype)
    if dim is None:
        return add_reduction(build, op.name, x, None, op.dtype)
    extremum = add_reduction(build, op.name, x, dim, op.dtype, keepdim)
    return [extremum, add_reduction(build, f"arg{op.name}", x, dim, "int64", keepdim)]


@lowers("var", "var_mean", rows=row_rules.follow_along_dims)
def variance(
    build: Builder, op: Operator, x: Tensor, /, dim: Any = None, unbiased: bool = True,
    correction: float | None = None, keepdim: bool = False,
) -> Tensor | list[Tensor]:  # fmt: skip
    """The variance along `dim`; with `var_mean`, also the mean. The squared differences from the
    mean are summed in a second pass, and divided by their number minus `correction`. If that is
    None, it is 1 if `unbiased`, else 0."""
    if correction is None:
        correction = float(unbiased)
    mean, var = mean_and_variance(build, x, dim, correction)
    results: list[Tensor] = [var, mean]
    if not keepdim:
        where = _zero_along(normalize_dims(x, dim), len(x.shape))
        shapes = [shape_of(result) for result in op.results]
        pairs = zip(results, shapes, strict=False)  # `var` has one result only
        results = [build.view(moment, shape, where) for moment, shape in pairs]
    return results if op.name == "var_mean" else results[0]


def _zero_along(dims: Sequence[int], rank: int) -> Callable[[Indices], Indices]:
    """A function that inserts 0 into an index at each of `dims`, so that it has `rank` dimensions:
    with dims [1] and rank 3, (i, j) -> (i, 0, j)."""

    def where(index: Indices) -> Indices:
        remaining = iter(index)
        return tuple(constant(0) if d in dims else next(remaining) for d in range(rank))

    return where


def mean_and_variance(
    build: Builder, x: Tensor, dims: Any, correction: float
) -> tuple[Tensor, Tensor]:
    """The mean and the variance along `dims`, which stay with size 1. The sum of squares is divided
    by the number of elements minus `correction`."""
    dims = normalize_dims(x, dims)
    count = math.prod(x.shape[d] for d in dims)
    summed = add_reduction(build, "sum", x, dims, x.dtype, keep=True)
    mean = build.map("div", [summed, float(count)], summed.shape, x.dtype)
    deviations = build.map("sub", [x, mean], x.shape, x.dtype)
    squares = build.map("square", [deviations], x.shape, x.dtype)
    squared_sum = add_reduction(build, "sum", squares, dims, x.dtype, keep=True)
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
    """Normalizes `x` to mean 0 and variance 1 over the last dimensions, which have the sizes
    `shape`; then multiplies by `weight` and adds `bias`, unless they are None. Also returns the
    means, and the factors 1 / sqrt(variance + eps)."""
    dims = list(range(len(x.shape) - len(shape), len(x.shape)))
    mean, var = mean_and_variance(build, x, dims, correction=0)
    scale = _inverse_root(build, var, eps)
    normed = build.map("sub", [x, mean], x.shape, x.dtype)
    normed = build.map("mul", [normed, scale], x.shape, x.dtype)
    return [_scale_and_shift(build, normed, weight, bias), mean, scale]


@lowers("native_group_norm")
def group_norm(
    build: Builder, op: Operator, x: Tensor, weight: Any, bias: Any, n: int, channels: int,
    rest: int, groups: int, eps: float, /,
) -> list[Tensor]:  # fmt: skip
    """Normalizes `x` to mean 0 and variance 1 in each group of channels; then multiplies by
    `weight` and adds `bias`, unless they are None. Also returns the means, and the factors
    1 / sqrt(variance + eps).

    The shape of `x` is (n, channels, …), and `rest` is the number of elements of a channel.
    """
    shape = (n, groups, channels // groups, rest)
    grouped = reshape(build, Operator.of("view", shape, x.dtype), x)
    mean, var = mean_and_variance(build, grouped, [2, 3], correction=0)
    scale = _inverse_root(build, var, eps)
    normed = build.map("sub", [grouped, mean], shape, x.dtype)
    normed = build.map("mul", [normed, scale], shape, x.dtype)
    normed = reshape(build, op, normed)
    ones = [1] * (len(x.shape) - 2)  # of the dimensions behind the channels
    weight, bias = (None if w is None else w.view(-1, *ones) for w in (weight, bias))
    return [_scale_and_shift(build, normed, weight, bias), mean, scale]


@lowers("_native_batch_norm_legit_no_training", rows=row_rules.follow_batch_norm)
def batch_norm(
    build: Builder, op: Operator, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, /,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    """Normalizes each channel with one fma for each element. Its factor and summand are computed
    here, in double precision. torch's other two results are for training only, and never read: `x`
    stands for them."""
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


def _scale_and_shift(build: Builder, x: Tensor, weight: Any, bias: Any) -> Tensor:
    """x * weight + bias. If `weight` or `bias` is None, it is left out."""
    if weight is not None:
        x = build.map("mul", [x, weight], x.shape, x.dtype)
    return x if bias is None else build.map("add", [x, bias], x.shape, x.dtype)


@lowers("_softmax", "_log_softmax", rows=row_rules.follow_along_dims)
def softmax(build: Builder, op: Operator, x: Tensor, /, dim: int) -> Tensor:
    """The softmax along `dim`, or its logarithm. The largest element is subtracted from all others
    before, so that no power overflows; there is one division for all elements along `dim`."""
    x = build.cast(x, op.dtype)
    if not x.shape:
        x = reshape(build, Operator.of("view", (1,), x.dtype), x)
    shape = x.shape
    largest = add_reduction(build, "max", x, dim, op.dtype, keep=True)
    exponents = build.map("sub", [x, largest], shape, op.dtype)
    powers = build.map("exp", [exponents], shape, op.dtype)
    summed = add_reduction(build, "sum", powers, dim, op.dtype, keep=True)
    if op.name == "_log_softmax":
        logarithm = build.map("log", [summed], summed.shape, op.dtype)
        result = build.map("sub", [exponents, logarithm], shape, op.dtype)
    else:
        inverse = build.map("div", [1.0, summed], summed.shape, op.dtype)
        result = build.map("mul", [powers, inverse], shape, op.dtype)
    return reshape(build, op, result)


@lowers("_safe_softmax", rows=row_rules.follow_along_dims)
def safe_softmax(build: Builder, op: Operator, x: Tensor, /, dim: int) -> Tensor:
    """The softmax along `dim`; it is 0, and not NaN, if all elements along `dim` are -inf."""
    is_least = build.map("eq", [x, float("-inf")], x.shape, "bool", cast_to=x.dtype)
    all_least = add_reduction(build, "all", is_least, dim, "bool", keep=True)
    probabilities = softmax(build, op, x, dim)
    return select(build, op, all_least, build.as_tensor(0.0, op.dtype), probabilities)


@lowers("cumsum", "cumprod", rows=row_rules.follow_along_dims)
def cumulative(build: Builder, op: Operator, x: Tensor, /, dim: int) -> Tensor:
    """The cumulative sums or products along `dim`."""
    if not x.shape:
        return build.cast(x, op.dtype)
    kind = {"cumsum": "sum", "cumprod": "prod"}[op.name]
    source = build.cast(x, op.dtype)
    return build.round_sums(build.add(Scan(kind, source, dim % len(x.shape))))


@lowers("_cdist_forward", rows=row_rules.follow_distances)
def distances(build: Builder, op: Operator, a: Any, b: Any, /, p: float) -> Tensor:
    """The Euclidean distance of each row of `a` from each row of `b`: (…, n, k) and (…, m, k) ->
    (…, n, m). Raises NotKnown for other norms than `p` = 2."""
    if p != 2:
        raise NotKnown(f"distances of norm {p}")
    left, right = build.as_tensor(a, op.dtype), build.as_tensor(b, op.dtype)
    shape = (*op.shape, left.shape[-1])
    rows_of_a = build.view(left, shape, lambda index: (*index[:-3], index[-3], index[-1]))
    rows_of_b = build.view(right, shape, lambda index: (*index[:-3], index[-2], index[-1]))
    differences = build.map("sub", [rows_of_a, rows_of_b], shape, op.dtype)
    squares = build.map("square", [differences], shape, op.dtype)
    summed = add_reduction(build, "sum", squares, -1, op.dtype)
    return build.map("sqrt", [summed], op.shape, op.dtype)
