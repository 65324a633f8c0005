"""Picking, sorting and putting elements by index. The indices may differ between rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engines.lanes.index import Index, Indices, entry, flat
from engines.lanes.operators.pointwise import common_dtype, select
from engines.lanes.operators.reductions import reduced
from engines.lanes.operators.registry import Step, lowers
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import (
    UNKNOWN,
    Constant,
    Gathered,
    Map,
    Pick,
    Scattered,
    Sorted,
    Tensor,
)


@lowers("gather")
def gather(build: Builder, step: Step, x: Any, dim: int, index: Any, **_: Any) -> Tensor:
    base = build.tensor(x)
    dim %= max(len(base.shape), 1)
    picks = [own(d) for d in range(len(base.shape))]
    picks[dim] = chosen(build, index, step.shape)
    return picked(build, base, step.shape, picks)


@lowers("index_select")
def index_select(build: Builder, step: Step, x: Any, dim: int, index: Any) -> Tensor:
    base = build.tensor(x)
    dim %= max(len(base.shape), 1)
    picks = [own(d) for d in range(len(base.shape))]
    picks[dim] = along(build, index, step.shape, dim)
    return picked(build, base, step.shape, picks)


@lowers("embedding")
def embedding(build: Builder, step: Step, weight: Any, index: Any, *_: Any) -> Tensor:
    base = build.tensor(weight)
    last = len(step.shape) - 1
    shape = step.shape[:-1]
    if isinstance(index, torch.Tensor):
        pick: Pick = _formula(index, shape, 0)
    else:
        spread = build.tensor(index, "int64")
        pick = build.view(spread, step.shape, lambda at: at[:last])
    return picked(build, base, step.shape, [pick, own(last)])


@lowers("index", "_unsafe_index")
def index(build: Builder, step: Step, x: Any, indices: Sequence[Any]) -> Tensor:
    """NumPy's rules: indices are broadcast against each other. Their dimensions replace the indexed
    dimensions if those are adjacent, else they come first."""
    base = build.tensor(x)
    if any(_dtype(i) == "bool" for i in indices if i is not None):
        raise NotKnown("picking by a mask, which gives each row another number of elements")
    given = [*indices, *[None] * (len(base.shape) - len(indices))]
    places = [d for d, i in enumerate(given) if i is not None]
    shape = torch.broadcast_shapes(*(tuple(given[d].shape) for d in places))
    adjacent = places[-1] - places[0] + 1 == len(places)
    begin = places[0] if adjacent else 0
    others = iter([d for d in range(len(step.shape)) if not begin <= d < begin + len(shape)])
    picks: list[Pick] = []
    for size, each in zip(base.shape, given, strict=True):
        if each is None:
            picks.append(own(next(others)))
        else:
            picks.append(_broadcast(build, each, shape, begin, size, step.shape))
    return picked(build, base, step.shape, picks)


def _broadcast(
    build: Builder, each: Any, shape: Sequence[int], begin: int, size: int, result: Sequence[int]
) -> Pick:
    """An index, broadcast to `shape`. Its dimensions are those of the result from `begin` on."""
    if isinstance(each, torch.Tensor):
        wrapped = torch.where(each < 0, each + size, each) if size != UNKNOWN else each
        return _formula(wrapped.expand(tuple(shape)), shape, begin)
    spread = build.expand(from_end(build, each, size), tuple(shape))
    return build.view(spread, result, lambda at: at[begin : begin + len(shape)])


def from_end(build: Builder, index: Tensor, size: int) -> Tensor:
    """The index with `size` added where it is negative."""
    index = build.cast(index, "int64")
    if size == UNKNOWN or (index.bounds is not None and index.bounds[0] >= 0):
        return index
    values = build.values

    def call(at: Any) -> Any:
        low, high = at.bounds
        if low >= 0:
            return at
        zero, more = values.literal(0, "int64"), values.literal(size, "int64")
        below = values.call("lt", at, zero, dtype="bool")
        moved = values.call("add", at, more, dtype="int64")
        bounds = (min(low + size, 0), max(high, size - 1))
        return values.call("select", below, moved, at, dtype="int64", bounds=bounds)

    return build.add(Map(values, "int64", call, [index], 2))


def picked(build: Builder, base: Tensor, shape: Sequence[int], picks: Sequence[Pick]) -> Tensor:
    """The elements of `base` at `picks`. If an index differs between rows, a `base` that rows
    compute is stored in memory."""
    if any(isinstance(pick, Tensor) for pick in picks):
        if UNKNOWN not in base.shape and not isinstance(base, Constant):
            base = build.in_memory(base)
        return build.add(Gathered(base, tuple(shape), picks))
    formulas: list[Callable[[Indices], Index]] = [p for p in picks if not isinstance(p, Tensor)]
    return build.view(base, shape, lambda at: tuple(f(at) for f in formulas))


def own(dim: int) -> Pick:
    """The index of the result along a dimension."""
    return lambda at: at[dim]


def chosen(build: Builder, index: Any, shape: Sequence[int]) -> Pick:
    """An index for each element of the result."""
    if isinstance(index, torch.Tensor):
        return _formula(index, shape, 0)
    return build.tensor(index, "int64")


def along(build: Builder, index: Any, shape: Sequence[int], dim: int) -> Pick:
    """An index for each place along one dimension of the result."""
    if isinstance(index, torch.Tensor):
        return _formula(index.reshape(-1), shape[dim : dim + 1], dim)
    spread = build.tensor(index, "int64")
    return build.view(spread, shape, lambda at: (at[dim],))


def _formula(index: torch.Tensor, shape: Sequence[int], begin: int) -> Pick:
    """A constant index. Its dimensions are those of the result from `begin` on."""
    table = tuple(int(i) for i in index.flatten().tolist())
    return lambda at: entry(table, flat(at[begin : begin + len(shape)], shape))


def _dtype(given: Any) -> str:
    return str(given.dtype).removeprefix("torch.")


@lowers("topk")
def topk(
    build: Builder, step: Step, x: Tensor, k: int, dim: int = -1, largest: bool = True,
    in_order: bool = True,
) -> list[Tensor]:  # fmt: skip
    return _first(build, x, dim, k, largest)


@lowers("sort")
def sort(build: Builder, step: Step, x: Tensor, *given: Any, **named: Any) -> list[Tensor]:
    stable = given and isinstance(given[0], bool) and len(given) > 1
    dim = named.get("dim", given[1] if stable else given[0] if given else -1)
    rest = given[2:] if stable else given[1:]
    descending = named.get("descending", rest[0] if rest else False)
    return _first(build, x, dim, x.shape[dim], descending)


def _first(build: Builder, x: Tensor, dim: int, count: int, descending: bool) -> list[Tensor]:
    made = Sorted(build.in_memory(x), dim % len(x.shape), count, descending)
    return [build.add(made), build.add(made.places)]


@lowers("scatter", "scatter_add", "scatter_reduce")
def scatter(
    build: Builder, step: Step, x: Any, dim: int, index: Any, source: Any, reduce: str = "put",
    **_: Any,
) -> Tensor:  # fmt: skip
    how = {"scatter_add": "sum"}.get(step.name, reduce)
    how = {"add": "sum", "multiply": "prod", "amax": "max", "amin": "min"}.get(how, how)
    if how not in ("put", "sum"):
        raise NotKnown(f"scatter with {how!r}")
    shape = tuple(index.shape)
    picks = [own(d) for d in range(len(shape))]
    picks[dim % len(shape)] = chosen(build, index, shape)
    given = build.tensor(source, step.dtype)
    if given.shape != shape:
        if given.shape:
            given = build.view(given, shape, lambda at: at)
        given = build.expand(given, shape)
    return _put(build, step, x, given, picks, how)


@lowers("index_put", "_unsafe_index_put")
def index_put(
    build: Builder, step: Step, x: Any, indices: Sequence[Any], source: Any,
    accumulate: bool = False,
) -> Tensor:  # fmt: skip
    given = [*indices, *[None] * (len(step.shape) - len(indices))]
    places = [d for d, i in enumerate(given) if i is not None]
    if any(_dtype(given[d]) == "bool" for d in places):
        raise NotKnown("putting by a mask, which gives each row another number of elements")
    shape = torch.broadcast_shapes(*(tuple(given[d].shape) for d in places))
    adjacent = places[-1] - places[0] + 1 == len(places)
    begin = places[0] if adjacent else 0
    kept = [size for d, size in enumerate(step.shape) if given[d] is None]
    whole = (*kept[:begin], *shape, *kept[begin:])
    others = iter([d for d in range(len(whole)) if not begin <= d < begin + len(shape)])
    picks: list[Pick] = []
    for size, each in zip(step.shape, given, strict=True):
        if each is None:
            picks.append(own(next(others)))
        else:
            picks.append(_broadcast(build, each, shape, begin, size, whole))
    given_source = build.expand(build.tensor(source, step.dtype), whole)
    return _put(build, step, x, given_source, picks, "sum" if accumulate else "put")


def _put(
    build: Builder, step: Step, x: Any, source: Tensor, picks: Sequence[Pick], how: str
) -> Tensor:
    base = build.tensor(x, step.dtype)
    return build.add(Scattered(base, source, picks, how))


@lowers("index_fill")
def index_fill(build: Builder, step: Step, x: Tensor, dim: int, index: Any, value: Any) -> Tensor:
    if not isinstance(index, torch.Tensor):
        raise NotKnown("filling at indices that differ between rows")
    chosen = torch.zeros(x.shape[dim], dtype=torch.bool).index_fill(0, index, True)
    shape = [1] * len(x.shape)
    shape[dim % len(shape)] = x.shape[dim]
    filled = build.tensor(value, step.dtype)
    return select(build, step, build.tensor(chosen.view(shape)), filled, x)


@lowers("bucketize", "searchsorted")
def bucketize(
    build: Builder, step: Step, a: Any, b: Any, *, out_int32: bool = False, right: bool = False,
    **_: Any,
) -> Tensor:  # fmt: skip
    """Counts the constant boundaries below each value."""
    values, edges = (a, b) if step.name == "bucketize" else (b, a)
    if not isinstance(edges, torch.Tensor) or edges.dim() != 1:
        raise NotKnown("boundaries that depend on the row")
    x, dtype = build.tensor(values), common_dtype(values, edges)
    shape = (*x.shape, len(edges))
    each = build.view(x, shape, lambda at: at[:-1])
    above = build.map("ge" if right else "gt", [each, edges], shape, "bool", of=dtype)
    counted = reduced(build, "sum", build.cast(above, step.dtype), -1, step.dtype)
    counted.bounds = 0, len(edges)
    return counted
