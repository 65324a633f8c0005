"""Sums, means, extrema, norms and softmax: loops over some dimensions of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from engines.exported import row_rules
from engines.lanes.index import constant
from engines.lanes.operators.pointwise import common_dtype, select
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
    """A reduction of `x`. `dims`: one dimension, several, or none for all dimensions."""
    rank = len(x.shape)
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    if dtype == "bool":
        kind = _OF_BOOLS.get(kind, kind)
    reduction: Tensor = build.add(Reduction(kind, x, sorted({d % rank for d in dims}), dtype, keep))
    return build.total(reduction) if kind in ("sum", "prod") else reduction


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
    if not x.shape:
        return build.cast(x, op.dtype)
    return reduced(build, _KINDS[op.name], build.cast(x, op.dtype), dim, op.dtype, keepdim)


@lowers("argmax", "argmin", rows=row_rules.along)
def place_of_extremum(
    build: Builder, op: Operator, x: Tensor, /, dim: int | None = None, keepdim: bool = False
) -> Tensor:
    """The index of the largest or smallest element; without `dim`, of all elements in memory
    order."""
    if dim is None:
        flat = torch.empty(x.count, device="meta")
        x, dim = reshape(build, Operator("view", (flat,)), x), 0
        place = reduced(build, op.name, x, 0, "int64")
        return reshape(build, op, place) if keepdim else place
    return reduced(build, op.name, x, dim, "int64", keepdim)


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
    shapes = [sizes(result) for result in op.results]
    results = [
        build.view(each, shape, _dropped(each.shape, shape, x, dim)) if not keepdim else each
        for each, shape in zip((var, mean), shapes, strict=False)
    ]
    return results if op.name == "var_mean" else results[0]


def _dropped(kept: Sequence[int], shape: Sequence[int], x: Tensor, dims: Any) -> Any:
    """A function from an index without the reduced dimensions to one that has 0 in them."""
    rank = len(x.shape)
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    gone = {d % rank for d in dims}

    def where(index: Any) -> Any:
        rest = iter(index)
        return tuple(constant(0) if d in gone else next(rest) for d in range(rank))

    return where


def moments(build: Builder, x: Tensor, dims: Any, correction: float) -> tuple[Tensor, Tensor]:
    """Mean and variance along `dims`, which are kept with size 1."""
    rank = len(x.shape)
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    count = math.prod(x.shape[d] for d in dims)
    summed = reduced(build, "sum", x, dims, x.dtype, True)
    mean = build.map("div", [summed, float(count)], summed.shape, x.dtype)
    away = build.map("sub", [x, mean], x.shape, x.dtype)
    squares = build.map("square", [away], x.shape, x.dtype)
    spread = reduced(build, "sum", squares, dims, x.dtype, True)
    divisor = max(count - correction, 0.0)
    return mean, build.map("div", [spread, divisor], spread.shape, x.dtype)


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
    grouped = reshape(build, _like(x, shape), x)
    mean, var = moments(build, grouped, [2, 3], 0)
    scale = _inverse_root(build, var, eps)
    normed = build.map("sub", [grouped, mean], shape, x.dtype)
    normed = build.map("mul", [normed, scale], shape, x.dtype)
    normed = reshape(build, op, normed)
    wide = [1] * (len(x.shape) - 2)
    weight, bias = (None if w is None else w.view(-1, *wide) for w in (weight, bias))
    return [_affine(build, normed, weight, bias), mean, scale]


@lowers("_native_batch_norm_legit_no_training", rows=row_rules.batch_norm)
def batch_norm(
    build: Builder, op: Operator, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, /,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    """One fma for each element. Its constants are computed in double precision."""
    scale = 1 / torch.sqrt(var.double() + eps)
    scale = scale if weight is None else scale * weight.double()
    shift = -mean.double() * scale + (0 if bias is None else bias.double())
    wide = [1] * (len(x.shape) - 2)
    given = [x, *(each.to(mean.dtype).view(-1, *wide) for each in (scale, shift))]
    return [build.map("fma", given, op.shape, op.dtype), x, x]


def _inverse_root(build: Builder, var: Tensor, eps: float) -> Tensor:
    moved = build.map("add", [var, eps], var.shape, var.dtype)
    root = build.map("sqrt", [moved], var.shape, var.dtype)
    return build.map("div", [1.0, root], var.shape, var.dtype)


def _affine(build: Builder, x: Tensor, weight: Any, bias: Any) -> Tensor:
    if weight is not None:
        x = build.map("mul", [x, weight], x.shape, x.dtype)
    return x if bias is None else build.map("add", [x, bias], x.shape, x.dtype)


@lowers("_softmax", "_log_softmax", rows=row_rules.along)
def softmax(build: Builder, op: Operator, x: Tensor, /, dim: int) -> Tensor:
    """One division for all probabilities along `dim`."""
    x = build.cast(x, op.dtype)
    if not x.shape:
        x = reshape(build, _like(x, (1,)), x)
    shape = x.shape
    most = reduced(build, "max", x, dim, op.dtype, True)
    less = build.map("sub", [x, most], shape, op.dtype)
    powers = build.map("exp", [less], shape, op.dtype)
    summed = reduced(build, "sum", powers, dim, op.dtype, True)
    if op.name == "_log_softmax":
        logarithm = build.map("log", [summed], summed.shape, op.dtype)
        shares = build.map("sub", [less, logarithm], shape, op.dtype)
    else:
        share = build.map("div", [1.0, summed], summed.shape, op.dtype)
        shares = build.map("mul", [powers, share], shape, op.dtype)
    return reshape(build, op, shares)


@lowers("_safe_softmax", rows=row_rules.along)
def safe_softmax(build: Builder, op: Operator, x: Tensor, /, dim: int) -> Tensor:
    """As `softmax`, but 0 if all elements along `dim` are -inf."""
    least = build.map("eq", [x, float("-inf")], x.shape, "bool", of=x.dtype)
    masked = reduced(build, "all", least, dim, "bool", True)
    shares = softmax(build, op, x, dim)
    return select(build, op, masked, build.tensor(0.0, op.dtype), shares)


@lowers("cumsum", "cumprod", rows=row_rules.along)
def scan(build: Builder, op: Operator, x: Tensor, /, dim: int) -> Tensor:
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
    one = build.view(left, shape, lambda index: (*index[:-3], index[-3], index[-1]))
    other = build.view(right, shape, lambda index: (*index[:-3], index[-2], index[-1]))
    apart = build.map("sub", [one, other], shape, op.dtype)
    squares = build.map("square", [apart], shape, op.dtype)
    summed = reduced(build, "sum", squares, -1, op.dtype)
    return build.map("sqrt", [summed], op.shape, op.dtype)


def _like(x: Tensor, shape: Sequence[int]) -> Operator:
    return Operator("view", (torch.empty(shape, dtype=getattr(torch, x.dtype), device="meta"),))


__all__ = ["common_dtype", "reduced"]
