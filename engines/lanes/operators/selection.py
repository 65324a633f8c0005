"""Picking, sorting and putting elements by index. The indices may differ between rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engines.exported import row_rules
from engines.lanes.functions import RANGES
from engines.lanes.index import Index, Indices, constant, entry, flat
from engines.lanes.operators.pointwise import common_dtype, select
from engines.lanes.operators.reductions import add_reduction
from engines.lanes.operators.registry import Operator, dtype_name, lowers
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import UNKNOWN, Constant, Gathered, Map, Pick, Scattered, Sorted
from engines.lanes.values import Tensor, Value


@lowers("gather", rows=row_rules.follow_gather)
def gather(build: Builder, op: Operator, x: Any, dim: int, index: Any, /) -> Tensor:
    """The elements of `x` at `index` along `dim`: each element of the result has its own index."""
    base = build.as_tensor(x)
    dim %= max(len(base.shape), 1)
    picks = [same_index(d) for d in range(len(base.shape))]
    picks[dim] = per_element(build, index, op.shape)
    return pick_elements(build, base, op.shape, picks)


@lowers("index_select", rows=row_rules.follow_index_select)
def index_select(build: Builder, op: Operator, x: Any, dim: int, index: Any, /) -> Tensor:
    """The elements of `x` at some indices along `dim`."""
    base = build.as_tensor(x)
    dim %= max(len(base.shape), 1)
    picks = [same_index(d) for d in range(len(base.shape))]
    picks[dim] = along_dim(build, index, op.shape, dim)
    return pick_elements(build, base, op.shape, picks)


@lowers("embedding", rows=row_rules.follow_embedding)
def embedding(build: Builder, op: Operator, weight: Any, index: Any, /) -> Tensor:
    """The rows of a table at the given indices."""
    base = build.as_tensor(weight)
    last = len(op.shape) - 1
    if isinstance(index, torch.Tensor):
        row: Pick = _constant_pick(index, op.shape[:last], 0)
    else:
        row = build.view(build.as_tensor(index, "int64"), op.shape, lambda at: at[:last])
    return pick_elements(build, base, op.shape, [row, same_index(last)])


@lowers("index", "_unsafe_index", rows=row_rules.follow_index)
def index(build: Builder, op: Operator, x: Any, indices: Sequence[Any], /) -> Tensor:
    """`x[indices]`; an index of None takes its whole dimension."""
    base, indices = build.as_tensor(x), _without_constant_masks(indices)
    if _masks_among(indices):
        raise NotKnown("picking by a mask, which gives each row another number of elements")
    picks = _Indexing.of(indices, base.shape).picks(build)
    return pick_elements(build, base, op.shape, picks)


@dataclass(frozen=True)
class _Indexing:
    """`base[indices]` by NumPy's rules: indices are broadcast against each other. Their dimensions
    replace the indexed dimensions if those are adjacent, else they come first.

    `base`: its shape. `indices`: one for each dimension of the base, None for a whole dimension.
    `common`: the shape to which they are broadcast. `begin`: the place in the result's shape where
    it begins.
    """

    base: Sequence[int]
    indices: Sequence[Any]
    common: tuple[int, ...]
    begin: int

    @classmethod
    def of(cls, indices: Sequence[Any], base: Sequence[int]) -> _Indexing:
        """The indexing of a base of this shape. At least one of the indices is not None; those of
        the last dimensions may be left out."""
        indices = [*indices, *[None] * (len(base) - len(indices))]
        indexed = [d for d, index in enumerate(indices) if index is not None]
        common = torch.broadcast_shapes(*(tuple(indices[d].shape) for d in indexed))
        adjacent = indexed[-1] - indexed[0] + 1 == len(indexed)
        return cls(base, indices, tuple(common), indexed[0] if adjacent else 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        whole = [n for n, index in zip(self.base, self.indices, strict=True) if index is None]
        return (*whole[: self.begin], *self.common, *whole[self.begin :])

    def picks(self, build: Builder) -> list[Pick]:
        """The index along each dimension of the base, for an element of the result."""
        end = self.begin + len(self.common)
        whole_dims = iter([*range(self.begin), *range(end, len(self.shape))])
        picks: list[Pick] = []
        for size, index in zip(self.base, self.indices, strict=True):
            if index is None:
                picks.append(same_index(next(whole_dims)))
            else:
                picks.append(self._broadcast(build, index, size))
        return picks

    def _broadcast(self, build: Builder, index: Any, size: int) -> Pick:
        """One of the indices, of a dimension with this size."""
        begin, end = self.begin, self.begin + len(self.common)
        if isinstance(index, torch.Tensor):
            wrapped = torch.where(index < 0, index + size, index) if size != UNKNOWN else index
            return _constant_pick(wrapped.expand(self.common), self.common, begin)
        spread = build.expand(from_end(build, index, size), self.common)
        return build.view(spread, self.shape, lambda at: at[begin:end])


def from_end(build: Builder, index: Tensor, size: int) -> Tensor:
    """The index with `size` added where it is negative."""
    index = build.cast(index, "int64")
    if size == UNKNOWN or (index.bounds is not None and index.bounds[0] >= 0):
        return index
    values = build.values

    def counted_from_begin(place: Value) -> Value:
        low, high = place.bounds or RANGES["int64"]
        if low >= 0:
            return place
        zero, more = values.literal(0, "int64"), values.literal(size, "int64")
        negative = values.call("lt", place, zero, dtype="bool")
        moved = values.call("add", place, more, dtype="int64")
        bounds = (min(low + size, 0), max(high, size - 1))
        return values.call("select", negative, moved, place, dtype="int64", bounds=bounds)

    return build.add(Map(values, "int64", counted_from_begin, [index], cost=2))


def pick_elements(
    build: Builder, base: Tensor, shape: Sequence[int], picks: Sequence[Pick]
) -> Tensor:
    """The elements of `base` at `picks`. If an index differs between rows, a `base` that rows
    compute is stored in memory."""
    if any(isinstance(pick, Tensor) for pick in picks):
        if UNKNOWN not in base.shape and not isinstance(base, Constant):
            base = build.storable(base)
        return build.add(Gathered(base, tuple(shape), picks))
    formulas: list[Callable[[Indices], Index]] = [p for p in picks if not isinstance(p, Tensor)]
    return build.view(base, shape, lambda at: tuple(formula(at) for formula in formulas))


def same_index(dim: int) -> Pick:
    """The index of the result along a dimension."""
    return lambda at: at[dim]


def per_element(build: Builder, index: Any, shape: Sequence[int]) -> Pick:
    """The given index of each element of the result; `index` has the result's `shape`."""
    if isinstance(index, torch.Tensor):
        return _constant_pick(index, shape, 0)
    return build.as_tensor(index, "int64")


def along_dim(build: Builder, index: Any, shape: Sequence[int], dim: int) -> Pick:
    """An index for each place along one dimension of the result, which has this `shape`."""
    if isinstance(index, torch.Tensor):
        return _constant_pick(index.reshape(-1), shape[dim : dim + 1], dim)
    return build.view(build.as_tensor(index, "int64"), shape, lambda at: (at[dim],))


def _constant_pick(index: torch.Tensor, shape: Sequence[int], begin: int) -> Pick:
    """An index that is the same for all rows. Its dimensions, of this `shape`, are those of the
    result from `begin` on."""
    table = tuple(int(i) for i in index.flatten().tolist())
    return lambda at: entry(table, flat(at[begin : begin + len(shape)], shape))


@lowers("topk", rows=row_rules.follow_along_dims)
def topk(
    build: Builder, op: Operator, x: Tensor, /, k: int, dim: int = -1, largest: bool = True,
) -> list[Tensor]:  # fmt: skip
    """The `k` largest or smallest elements along `dim`, in order, and their indices."""
    return _first_in_order(build, x, dim, k, largest)


@lowers("sort", rows=row_rules.follow_along_dims)
def sort(
    build: Builder, op: Operator, x: Tensor, /, dim: int = -1, descending: bool = False
) -> list[Tensor]:
    """The elements in order along `dim`, and their indices."""
    return _first_in_order(build, x, dim, x.shape[dim], descending)


def _first_in_order(
    build: Builder, x: Tensor, dim: int, count: int, descending: bool
) -> list[Tensor]:
    """The first `count` elements in order along `dim`, and their indices."""
    numbers = build.cast(x, "int32") if x.dtype == "bool" else x  # a stored true is -1
    in_order = Sorted(build.storable(numbers), dim % len(x.shape), count, descending)
    return [build.cast(build.add(in_order), x.dtype), build.add(in_order.places)]


# The names of reductions in `scatter` and `scatter_reduce`, and their names here.
_SHORT_NAMES = {"add": "sum", "multiply": "prod", "amax": "max", "amin": "min"}


@lowers("scatter", "scatter_add", "scatter_reduce", rows=row_rules.follow_scatter)
def scatter(
    build: Builder, op: Operator, x: Any, dim: int, index: Any, source: Any, /, reduce: str = "put",
    include_self: bool = True,
) -> Tensor:  # fmt: skip
    """Write or add `source` at indices along `dim`."""
    how = "sum" if op.name == "scatter_add" else _SHORT_NAMES.get(reduce, reduce)
    if how not in ("put", "sum"):
        raise NotKnown(f"scatter with {how!r}")
    shape = tuple(index.shape)
    picks = [same_index(d) for d in range(len(shape))]
    picks[dim % len(shape)] = per_element(build, index, shape)
    numbers = build.as_tensor(source, op.dtype)
    if numbers.shape and numbers.shape != shape:  # of a larger source, the first elements count
        numbers = build.view(numbers, shape, lambda at: at)
    numbers = build.expand(numbers, shape)
    if not include_self:  # the sum starts from 0 where something is added
        zeros = build.expand(build.as_tensor(0, op.dtype), shape)
        x = _scatter(build, op, x, zeros, picks, "put")
    return _scatter(build, op, x, numbers, picks, how)


@lowers("index_put", "_unsafe_index_put", rows=row_rules.follow_index)
def index_put(
    build: Builder, op: Operator, x: Any, indices: Sequence[Any], source: Any, /,
    accumulate: bool = False,
) -> Tensor:  # fmt: skip
    """Write or add `source` where indices or a mask say."""
    indices = _without_constant_masks(indices)
    if _masks_among(indices):
        return _put_by_mask(build, op, build.as_tensor(x), indices, source, accumulate)
    indexing = _Indexing.of(indices, op.shape)
    picks = indexing.picks(build)
    numbers = build.expand(build.as_tensor(source, op.dtype), indexing.shape)
    return _scatter(build, op, x, numbers, picks, "sum" if accumulate else "put")


def _masks_among(indices: Sequence[Any]) -> list[Any]:
    """The indices that are masks: torch takes uint8 as bool."""
    return [i for i in indices if i is not None and dtype_name(i) in ("bool", "uint8")]


def _without_constant_masks(indices: Sequence[Any]) -> list[Any]:
    """The indices, with those of the true elements in place of each mask that no row changes."""
    numbers: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and _masks_among([index]):
            numbers += index.bool().nonzero(as_tuple=True)  # an index for each dimension
        else:
            numbers.append(index)
    return numbers


def _put_by_mask(
    build: Builder, op: Operator, x: Tensor, indices: Sequence[Any], source: Any, accumulate: bool
) -> Tensor:
    """`x[mask] = number`, also with dimensions before and behind those of the mask, which is the
    last of the indices. All others are None."""
    value, dim = build.as_tensor(source, op.dtype), len(indices) - 1
    if value.count != 1 or any(i is not None for i in indices[:dim]):
        raise NotKnown("putting several values by a mask, whose number differs between rows")
    mask = build.cast(indices[dim], "bool")
    rank = len(mask.shape)
    shape = (*mask.shape, *[1] * (len(op.shape) - dim - rank))
    mask = build.view(mask, shape, lambda at: at[:rank])
    number = build.view(value, (), lambda at: (constant(0),) * len(value.shape))
    put = build.map("add", [x, number], op.shape, op.dtype) if accumulate else number
    return select(build, op, mask, put, x)


def _scatter(
    build: Builder, op: Operator, x: Any, source: Tensor, picks: Sequence[Pick], how: str
) -> Tensor:
    """Write, or add with `how` "sum", the elements of `source` at the picked places of `x`."""
    base = build.as_tensor(x, op.dtype)
    if how != "sum":
        return build.add(Scattered(base, source, picks, how))
    if op.dtype == "bool":  # a stored true is -1, and a sum of two would be -2
        base, source = build.cast(base, "int32"), build.cast(source, "int32")
    return build.cast(build.round_sums(build.add(Scattered(base, source, picks, how))), op.dtype)


@lowers("index_fill", rows=row_rules.follow_index_add)
def index_fill(
    build: Builder, op: Operator, x: Tensor, dim: int, index: Any, value: Any, /
) -> Tensor:
    """Write a number at constant indices along `dim`."""
    if not isinstance(index, torch.Tensor):
        raise NotKnown("filling at indices that differ between rows")
    chosen = torch.zeros(x.shape[dim], dtype=torch.bool).index_fill(0, index, True)
    shape = [1] * len(x.shape)
    shape[dim % len(shape)] = x.shape[dim]
    filled = build.as_tensor(value, op.dtype)
    return select(build, op, build.as_tensor(chosen.view(shape)), filled, x)


@lowers("bucketize", rows=row_rules.follow_search)
def bucketize(build: Builder, op: Operator, x: Any, edges: Any, /, right: bool = False) -> Tensor:
    """The bin of each value; with `right`, a value at an edge is in the bin above it."""
    return _search(build, op, x, edges, right)


@lowers("searchsorted", rows=row_rules.follow_search)
def searchsorted(
    build: Builder, op: Operator, edges: Any, x: Any, /, right: bool = False,
    side: str | None = None, sorter: Any = None,
) -> Tensor:  # fmt: skip
    """The place of each value among the edges; with `right`, behind those that are equal to it."""
    if sorter is not None:
        sorting = Operator.of("gather", edges.shape, dtype_name(edges))
        edges = gather(build, sorting, edges, -1, sorter)
    return _search(build, op, x, edges, right or side == "right")


def _search(build: Builder, op: Operator, x: Any, edges: Any, right: bool) -> Tensor:
    """The number of edges below each value; with `right`, also of those that are equal to it. It is
    the number of all edges for NaN."""
    dtype, count = common_dtype(x, edges), edges.shape[-1]
    values = build.expand(build.as_tensor(x, dtype), op.shape)
    is_behind = "gt" if right else "ge"  # of an edge and a value; false for NaN
    if isinstance(edges, torch.Tensor) and edges.dim() == 1 and _is_ascending(edges):
        shape = (*op.shape, count)
        spread = build.view(values, shape, lambda at: at[:-1])
        compared = build.map(is_behind, [edges, spread], shape, "bool", of=dtype)
        behind = add_reduction(build, "sum", build.cast(compared, op.dtype), -1, op.dtype)
        behind.bounds = 0, count
        place = build.map("sub", [count, behind], op.shape, op.dtype)
    else:
        halved = _binary_search(build, op, values, build.as_tensor(edges, dtype), is_behind)
        place = build.cast(halved, op.dtype)
    place.bounds = 0, count
    return place


def _is_ascending(edges: torch.Tensor) -> bool:
    """True if constant edges are in order, and none is NaN."""
    return bool((edges[:-1] <= edges[1:]).all()) and not bool(edges.isnan().any())


def _binary_search(
    build: Builder, op: Operator, values: Tensor, edges: Tensor, is_behind: str
) -> Tensor:
    """torch's own search by halves, so that edges which are not in order give the same numbers.
    Each step of the loop halves the places from `begin` to `end`, unless none is left."""
    count, lead = edges.shape[-1], len(edges.shape) - 1

    def integer(function: str, *arguments: Any) -> Tensor:
        return build.map(function, arguments, op.shape, "int64")

    def truth(function: str, *arguments: Any, of: str = "bool") -> Tensor:
        return build.map(function, arguments, op.shape, "bool", of=of)

    of_integers = Operator.of("where", op.shape, "int64")
    begin, end = (build.expand(build.as_tensor(n, "int64"), op.shape) for n in (0, count))
    for _ in range(count.bit_length()):
        middle = integer("bitwise_right_shift", integer("add", begin, end), 1)
        place = integer("maximum", integer("minimum", middle, count - 1), 0)  # also if none is left
        edge = pick_elements(build, edges, op.shape, [*(same_index(d) for d in range(lead)), place])
        going = truth("lt", begin, end, of="int64")
        behind = truth(is_behind, edge, values, of=values.dtype)
        before = truth("bitwise_and", going, truth("bitwise_not", behind))
        begin = select(build, of_integers, before, integer("add", middle, 1), begin)
        end = select(build, of_integers, truth("bitwise_and", going, behind), middle, end)
    return begin
