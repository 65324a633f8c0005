"""Picking, sorting and putting elements by index. The indices may differ between rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engines.exported import row_rules
from engines.lanes.index import Index, Indices, constant, entry, flat
from engines.lanes.operators.pointwise import common_dtype, select
from engines.lanes.operators.reductions import reduced
from engines.lanes.operators.registry import Operator, lowers
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import UNKNOWN, Constant, Gathered, Map, Pick, Scattered, Sorted
from engines.lanes.values import Tensor


@lowers("gather", rows=row_rules.gathered)
def gather(build: Builder, op: Operator, x: Any, dim: int, index: Any, /) -> Tensor:
    base = build.tensor(x)
    dim %= max(len(base.shape), 1)
    picks = [own(d) for d in range(len(base.shape))]
    picks[dim] = per_element(build, index, op.shape)
    return picked(build, base, op.shape, picks)


@lowers("index_select", rows=row_rules.index_select)
def index_select(build: Builder, op: Operator, x: Any, dim: int, index: Any, /) -> Tensor:
    base = build.tensor(x)
    dim %= max(len(base.shape), 1)
    picks = [own(d) for d in range(len(base.shape))]
    picks[dim] = along(build, index, op.shape, dim)
    return picked(build, base, op.shape, picks)


@lowers("embedding", rows=row_rules.embedding)
def embedding(build: Builder, op: Operator, weight: Any, index: Any, /) -> Tensor:
    """The rows of a table at the given indices."""
    base = build.tensor(weight)
    last = len(op.shape) - 1
    shape = op.shape[:-1]
    if isinstance(index, torch.Tensor):
        pick: Pick = _formula(index, shape, 0)
    else:
        spread = build.tensor(index, "int64")
        pick = build.view(spread, op.shape, lambda at: at[:last])
    return picked(build, base, op.shape, [pick, own(last)])


@lowers("index", "_unsafe_index", rows=row_rules.indexed)
def index(build: Builder, op: Operator, x: Any, indices: Sequence[Any], /) -> Tensor:
    """NumPy's rules: indices are broadcast against each other. Their dimensions replace the indexed
    dimensions if those are adjacent, else they come first."""
    base, indices = build.tensor(x), _without_constant_masks(indices)
    if _masks(indices):
        raise NotKnown("picking by a mask, which gives each row another number of elements")
    given = [*indices, *[None] * (len(base.shape) - len(indices))]
    places = [d for d, i in enumerate(given) if i is not None]
    shape = torch.broadcast_shapes(*(tuple(given[d].shape) for d in places))
    adjacent = places[-1] - places[0] + 1 == len(places)
    begin = places[0] if adjacent else 0
    others = iter([d for d in range(len(op.shape)) if not begin <= d < begin + len(shape)])
    picks: list[Pick] = []
    for size, each in zip(base.shape, given, strict=True):
        if each is None:
            picks.append(own(next(others)))
        else:
            picks.append(_broadcast(build, each, shape, begin, size, op.shape))
    return picked(build, base, op.shape, picks)


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


def per_element(build: Builder, index: Any, shape: Sequence[int]) -> Pick:
    """The given index of each element of the result; `index` has the result's `shape`."""
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


def _torch_dtype(given: Any) -> torch.dtype:
    return getattr(torch, _dtype(given))  # type: ignore[no-any-return]


def _dtype(given: Any) -> str:
    return str(given.dtype).removeprefix("torch.")


@lowers("topk", rows=row_rules.along)
def topk(
    build: Builder, op: Operator, x: Tensor, /, k: int, dim: int = -1, largest: bool = True,
) -> list[Tensor]:  # fmt: skip
    return _first(build, x, dim, k, largest)


@lowers("sort", rows=row_rules.along)
def sort(
    build: Builder, op: Operator, x: Tensor, /, dim: int = -1, descending: bool = False
) -> list[Tensor]:
    return _first(build, x, dim, x.shape[dim], descending)


def _first(build: Builder, x: Tensor, dim: int, count: int, descending: bool) -> list[Tensor]:
    numbers = build.cast(x, "int32") if x.dtype == "bool" else x  # true is -1
    in_order = Sorted(build.in_memory(numbers), dim % len(x.shape), count, descending)
    return [build.cast(build.add(in_order), x.dtype), build.add(in_order.places)]


# The names of reductions in `scatter` and `scatter_reduce`, and their short names here.
_SHORT = {"add": "sum", "multiply": "prod", "amax": "max", "amin": "min"}


@lowers("scatter", "scatter_add", "scatter_reduce", rows=row_rules.scattered)
def scatter(
    build: Builder, op: Operator, x: Any, dim: int, index: Any, source: Any, /, reduce: str = "put",
    include_self: bool = True,
) -> Tensor:  # fmt: skip
    """Write or add `source` at indices along `dim`."""
    how = "sum" if op.name == "scatter_add" else _SHORT.get(reduce, reduce)
    if how not in ("put", "sum"):
        raise NotKnown(f"scatter with {how!r}")
    shape = tuple(index.shape)
    picks = [own(d) for d in range(len(shape))]
    picks[dim % len(shape)] = per_element(build, index, shape)
    given = build.tensor(source, op.dtype)
    if given.shape and given.shape != shape:  # of a larger source, the first elements count
        given = build.view(given, shape, lambda at: at)
    given = build.expand(given, shape)
    if not include_self:  # the sum starts from 0 where something is added
        zeros = build.expand(build.tensor(0, op.dtype), shape)
        x = _put(build, op, x, zeros, picks, "put")
    return _put(build, op, x, given, picks, how)


@lowers("index_put", "_unsafe_index_put", rows=row_rules.indexed)
def index_put(
    build: Builder, op: Operator, x: Any, indices: Sequence[Any], source: Any, /,
    accumulate: bool = False,
) -> Tensor:  # fmt: skip
    """Write or add `source` where indices or a mask say."""
    indices = _without_constant_masks(indices)
    if _masks(indices):
        return _put_by_mask(build, op, build.tensor(x), indices, source, accumulate)
    given = [*indices, *[None] * (len(op.shape) - len(indices))]
    places = [d for d, i in enumerate(given) if i is not None]
    shape = torch.broadcast_shapes(*(tuple(given[d].shape) for d in places))
    adjacent = places[-1] - places[0] + 1 == len(places)
    begin = places[0] if adjacent else 0
    kept = [size for d, size in enumerate(op.shape) if given[d] is None]
    whole = (*kept[:begin], *shape, *kept[begin:])
    others = iter([d for d in range(len(whole)) if not begin <= d < begin + len(shape)])
    picks: list[Pick] = []
    for size, each in zip(op.shape, given, strict=True):
        if each is None:
            picks.append(own(next(others)))
        else:
            picks.append(_broadcast(build, each, shape, begin, size, whole))
    given_source = build.expand(build.tensor(source, op.dtype), whole)
    return _put(build, op, x, given_source, picks, "sum" if accumulate else "put")


def _masks(indices: Sequence[Any]) -> list[Any]:
    """The indices that are masks: torch takes uint8 as bool."""
    return [i for i in indices if i is not None and _dtype(i) in ("bool", "uint8")]


def _without_constant_masks(indices: Sequence[Any]) -> list[Any]:
    """The indices, with those of the true elements in place of each mask that no row changes."""
    kept: list[Any] = []
    for each in indices:
        constant_mask = isinstance(each, torch.Tensor) and bool(_masks([each]))
        kept += each.bool().nonzero(as_tuple=True) if constant_mask else [each]
    return kept


def _put_by_mask(
    build: Builder, op: Operator, x: Tensor, indices: Sequence[Any], source: Any, accumulate: bool
) -> Tensor:
    """`x[mask] = number`, also with dimensions before and behind those of the mask."""
    value, dim = build.tensor(source, op.dtype), len(indices) - 1
    if value.count != 1 or any(i is not None for i in indices[:dim]):
        raise NotKnown("putting several values by a mask, whose number differs between rows")
    mask = build.cast(indices[dim], "bool")
    rank = len(mask.shape)
    shape = (*mask.shape, *[1] * (len(op.shape) - dim - rank))
    mask = build.view(mask, shape, lambda at: at[:rank])
    one = build.view(value, (), lambda at: (constant(0),) * len(value.shape))
    put = build.map("add", [x, one], op.shape, op.dtype) if accumulate else one
    return select(build, op, mask, put, x)


def _put(
    build: Builder, op: Operator, x: Any, source: Tensor, picks: Sequence[Pick], how: str
) -> Tensor:
    """Write, or add with `how` "sum", the elements of `source` at the picked places of `x`."""
    base = build.tensor(x, op.dtype)
    if how != "sum":
        return build.add(Scattered(base, source, picks, how))
    if op.dtype == "bool":  # true is -1
        base, source = build.cast(base, "int32"), build.cast(source, "int32")
    return build.cast(build.total(build.add(Scattered(base, source, picks, how))), op.dtype)


@lowers("index_fill", rows=row_rules.index_added)
def index_fill(
    build: Builder, op: Operator, x: Tensor, dim: int, index: Any, value: Any, /
) -> Tensor:
    """Write a number at constant indices along `dim`."""
    if not isinstance(index, torch.Tensor):
        raise NotKnown("filling at indices that differ between rows")
    chosen = torch.zeros(x.shape[dim], dtype=torch.bool).index_fill(0, index, True)
    shape = [1] * len(x.shape)
    shape[dim % len(shape)] = x.shape[dim]
    filled = build.tensor(value, op.dtype)
    return select(build, op, build.tensor(chosen.view(shape)), filled, x)


@lowers("bucketize", rows=row_rules.searched)
def bucketize(build: Builder, op: Operator, x: Any, edges: Any, /, right: bool = False) -> Tensor:
    return _searched(build, op, x, edges, right)


@lowers("searchsorted", rows=row_rules.searched)
def searchsorted(
    build: Builder, op: Operator, edges: Any, x: Any, /, right: bool = False,
    side: str | None = None, sorter: Any = None,
) -> Tensor:  # fmt: skip
    if sorter is not None:
        result = torch.empty(tuple(edges.shape), dtype=_torch_dtype(edges), device="meta")
        edges = gather(build, Operator("gather", (result,)), edges, -1, sorter)
    return _searched(build, op, x, edges, right or side == "right")


def _searched(build: Builder, op: Operator, x: Any, edges: Any, right: bool) -> Tensor:
    """The number of edges below each value. It is the number of all edges for NaN."""
    dtype, count = common_dtype(x, edges), edges.shape[-1]
    values = build.expand(build.tensor(x, dtype), op.shape)
    compared = "gt" if right else "ge"
    if isinstance(edges, torch.Tensor) and edges.dim() == 1 and _ascending(edges):
        shape = (*op.shape, count)
        each = build.view(values, shape, lambda at: at[:-1])
        above = build.map(compared, [edges, each], shape, "bool", of=dtype)
        behind = reduced(build, "sum", build.cast(above, op.dtype), -1, op.dtype)
        behind.bounds = 0, count
        found = build.map("sub", [count, behind], op.shape, op.dtype)
    else:
        found = build.cast(
            _halved(build, op, values, build.tensor(edges, dtype), compared), op.dtype
        )
    found.bounds = 0, count
    return found


def _ascending(edges: torch.Tensor) -> bool:
    return bool((edges[:-1] <= edges[1:]).all()) and not bool(edges.isnan().any())


def _halved(build: Builder, op: Operator, values: Tensor, edges: Tensor, compared: str) -> Tensor:
    """torch's own search by halves, so that edges which are not in order give the same numbers."""
    count, lead = edges.shape[-1], len(edges.shape) - 1

    def integer(function: str, *given: Any) -> Tensor:
        return build.map(function, given, op.shape, "int64")

    def truth(function: str, *given: Any, of: str = "bool") -> Tensor:
        return build.map(function, given, op.shape, "bool", of=of)

    of_integers = Operator("where", (torch.empty(op.shape, dtype=torch.int64, device="meta"),))
    begin, end = (build.expand(build.tensor(at, "int64"), op.shape) for at in (0, count))
    for _ in range(count.bit_length()):
        middle = integer("bitwise_right_shift", integer("add", begin, end), 1)
        place = integer("maximum", integer("minimum", middle, count - 1), 0)
        edge = picked(build, edges, op.shape, [*(own(d) for d in range(lead)), place])
        going = truth("lt", begin, end, of="int64")
        behind = truth(compared, edge, values, of=values.dtype)
        before = truth("bitwise_and", going, truth("bitwise_not", behind))
        begin = select(build, of_integers, before, integer("add", middle, 1), begin)
        end = select(build, of_integers, truth("bitwise_and", going, behind), middle, end)
    return begin
