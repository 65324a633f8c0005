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
    """The elements of `x` at `index` along `dim`: each element of the result has an index of its
    own, and `index` has the result's shape."""
    base = build.as_tensor(x)
    dim %= max(len(base.shape), 1)
    picks = [same_index(d) for d in range(len(base.shape))]
    picks[dim] = pick_per_element(build, index, op.shape)
    return pick_elements(build, base, op.shape, picks)


@lowers("index_select", rows=row_rules.follow_index_select)
def index_select(build: Builder, op: Operator, x: Any, dim: int, index: Any, /) -> Tensor:
    """The elements of `x` at the indices in the vector `index` along `dim`."""
    base = build.as_tensor(x)
    dim %= max(len(base.shape), 1)
    picks = [same_index(d) for d in range(len(base.shape))]
    picks[dim] = pick_along_dim(build, index, op.shape, dim)
    return pick_elements(build, base, op.shape, picks)


@lowers("embedding", rows=row_rules.follow_embedding)
def embedding(build: Builder, op: Operator, weight: Any, index: Any, /) -> Tensor:
    """The rows of the table `weight` at the given indices, along a new last dimension."""
    base = build.as_tensor(weight)
    last = len(op.shape) - 1
    if isinstance(index, torch.Tensor):
        row: Pick = _constant_pick(index, op.shape[:last], 0)
    else:
        row = build.view(build.as_tensor(index, "int64"), op.shape, lambda own: own[:last])
    return pick_elements(build, base, op.shape, [row, same_index(last)])


@lowers("index", "_unsafe_index", rows=row_rules.follow_index)
def index(build: Builder, op: Operator, x: Any, indices: Sequence[Any], /) -> Tensor:
    """`x[indices]` by NumPy's rules (see `_Indexing`). An index of None takes its whole dimension.
    Raises NotKnown for a mask that differs between rows."""
    base, indices = build.as_tensor(x), _without_constant_masks(indices)
    if _masks_among(indices):
        raise NotKnown("picking by a mask, which gives each row another number of elements")
    picks = _Indexing.of(indices, base.shape).picks(build)
    return pick_elements(build, base, op.shape, picks)


@dataclass(frozen=True)
class _Indexing:
    """What `base[indices]` means by NumPy's rules: the indices are broadcast to a common shape. In
    the result, its dimensions replace the indexed dimensions of the base if these are adjacent;
    otherwise they come first.

    base : the shape of the base.
    indices : an index for each dimension of the base, or None for a whole dimension.
    common : the shape to which the indices are broadcast.
    begin : the dimension of the result at which those of `common` begin.
    """

    base: Sequence[int]
    indices: Sequence[Any]
    common: tuple[int, ...]
    begin: int

    @classmethod
    def of(cls, indices: Sequence[Any], base: Sequence[int]) -> _Indexing:
        """Indexes a base of this shape. At least one of the indices is not None; they may be fewer
        than the dimensions of the base, of which the last ones are then whole."""
        indices = [*indices, *[None] * (len(base) - len(indices))]
        indexed = [d for d, index in enumerate(indices) if index is not None]
        common = torch.broadcast_shapes(*(tuple(indices[d].shape) for d in indexed))
        adjacent = indexed[-1] - indexed[0] + 1 == len(indexed)
        return cls(base, indices, tuple(common), indexed[0] if adjacent else 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        whole = [size for size, index in zip(self.base, self.indices, strict=True) if index is None]
        return (*whole[: self.begin], *self.common, *whole[self.begin :])

    def picks(self, build: Builder) -> list[Pick]:
        """The index along each dimension of the base of an element of the result: see `Pick`."""
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
        """The pick that takes one of the indices, broadcast to the common shape. `size`, that of
        the dimension that it indexes, is added to negative indices."""
        begin, end = self.begin, self.begin + len(self.common)
        if isinstance(index, torch.Tensor):
            wrapped = torch.where(index < 0, index + size, index) if size != UNKNOWN else index
            return _constant_pick(wrapped.expand(self.common), self.common, begin)
        spread = build.expand(wrap_negative(build, index, size), self.common)
        return build.view(spread, self.shape, lambda own: own[begin:end])


def wrap_negative(build: Builder, index: Tensor, size: int) -> Tensor:
    """Returns a tensor of indices as int64, with `size` added to those that are negative. If `size`
    is UNKNOWN, none is changed."""
    index = build.cast(index, "int64")
    if size == UNKNOWN or (index.bounds is not None and index.bounds[0] >= 0):
        return index
    values = build.values

    def wrap(position: Value) -> Value:
        low, high = position.bounds or RANGES["int64"]
        if low >= 0:
            return position
        zero, whole = values.literal(0, "int64"), values.literal(size, "int64")
        is_negative = values.call("lt", position, zero, dtype="bool")
        moved = values.call("add", position, whole, dtype="int64")
        bounds = (min(low + size, 0), max(high, size - 1))
        return values.call("select", is_negative, moved, position, dtype="int64", bounds=bounds)

    return build.add(Map(values, "int64", wrap, [index], cost=2))


def pick_elements(
    build: Builder, base: Tensor, shape: Sequence[int], picks: Sequence[Pick]
) -> Tensor:
    """Returns the elements of `base` at `picks` (see `Pick`), as a tensor of this shape: a view if
    no pick is a tensor, otherwise a `Gathered`. For this a base that rows compute must be storable.
    """
    if any(isinstance(pick, Tensor) for pick in picks):
        if UNKNOWN not in base.shape and not isinstance(base, Constant):
            base = build.storable(base)
        return build.add(Gathered(base, tuple(shape), picks))
    formulas: list[Callable[[Indices], Index]] = [p for p in picks if not isinstance(p, Tensor)]
    return build.view(base, shape, lambda own: tuple(formula(own) for formula in formulas))


def same_index(dim: int) -> Pick:
    """The pick that is an element's own index along a dimension of the result."""
    return lambda own: own[dim]


def pick_per_element(build: Builder, index: Any, shape: Sequence[int]) -> Pick:
    """The pick that takes a given index for each element of the result. `index` has the result's
    `shape`."""
    if isinstance(index, torch.Tensor):
        return _constant_pick(index, shape, 0)
    return build.as_tensor(index, "int64")


def pick_along_dim(build: Builder, index: Any, shape: Sequence[int], dim: int) -> Pick:
    """The pick that takes entry i of the vector `index` for the elements whose index along `dim` of
    the result is i. `shape` is that of the result."""
    if isinstance(index, torch.Tensor):
        return _constant_pick(index.reshape(-1), shape[dim : dim + 1], dim)
    return build.view(build.as_tensor(index, "int64"), shape, lambda own: (own[dim],))


def _constant_pick(index: torch.Tensor, shape: Sequence[int], begin: int) -> Pick:
    """The pick that takes an entry of `index`, which is the same for all rows. The dimensions of
    `index`, of this `shape`, are those of the result from `begin` on."""
    table = tuple(int(i) for i in index.flatten().tolist())
    return lambda own: entry(table, flat(own[begin : begin + len(shape)], shape))


@lowers("topk", rows=row_rules.follow_along_dims)
def topk(
    build: Builder, op: Operator, x: Tensor, /, k: int, dim: int = -1, largest: bool = True,
) -> list[Tensor]:  # fmt: skip
    """The `k` largest or smallest elements along `dim`, in order, and their indices."""
    return _sort_along(build, x, dim, k, largest)


@lowers("sort", rows=row_rules.follow_along_dims)
def sort(
    build: Builder, op: Operator, x: Tensor, /, dim: int = -1, descending: bool = False
) -> list[Tensor]:
    """The elements in ascending or descending order along `dim`, and their indices."""
    return _sort_along(build, x, dim, x.shape[dim], descending)


def _sort_along(build: Builder, x: Tensor, dim: int, count: int, descending: bool) -> list[Tensor]:
    """Adds a sort along `dim`. Returns the first `count` elements in order, and their indices."""
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
    """`x` after the elements of `source` are written over, or added to, those at `index` along
    `dim`. The first elements of `source` are taken, as many as `index` has; it may be a number. If
    `include_self` is false, the elements that are added to count as 0."""
    how = "sum" if op.name == "scatter_add" else _SHORT_NAMES.get(reduce, reduce)
    if how not in ("put", "sum"):
        raise NotKnown(f"scatter with {how!r}")
    shape = tuple(index.shape)
    picks = [same_index(d) for d in range(len(shape))]
    picks[dim % len(shape)] = pick_per_element(build, index, shape)
    numbers = build.as_tensor(source, op.dtype)
    if numbers.shape and numbers.shape != shape:  # of a larger source, the first elements count
        numbers = build.view(numbers, shape, lambda own: own)
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
    """`x` after `x[indices] = source`, or `x[indices] += source` if `accumulate`. An index may also
    be a mask."""
    indices = _without_constant_masks(indices)
    if _masks_among(indices):
        return _put_by_mask(build, op, build.as_tensor(x), indices, source, accumulate)
    indexing = _Indexing.of(indices, op.shape)
    picks = indexing.picks(build)
    numbers = build.expand(build.as_tensor(source, op.dtype), indexing.shape)
    return _scatter(build, op, x, numbers, picks, "sum" if accumulate else "put")


def _masks_among(indices: Sequence[Any]) -> list[Any]:
    """Those of the indices that are masks: of bools, or of uint8, which torch takes as bools."""
    return [i for i in indices if i is not None and dtype_name(i) in ("bool", "uint8")]


def _without_constant_masks(indices: Sequence[Any]) -> list[Any]:
    """The indices, in which each mask that is the same for all rows is replaced by the indices of
    its true elements: one for each dimension of the mask."""
    numbers: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and _masks_among([index]):
            numbers += index.bool().nonzero(as_tuple=True)
        else:
            numbers.append(index)
    return numbers


def _put_by_mask(
    build: Builder, op: Operator, x: Tensor, indices: Sequence[Any], source: Any, accumulate: bool
) -> Tensor:
    """`x` after `x[mask] = source`, or `+=` if `accumulate`, for a mask that differs between rows
    and a source of one number.

    The mask is the last of the indices, and all others are None: `x` may have more dimensions
    before and behind those of the mask. Raises NotKnown for other indices or sources.
    """
    value, first_dim = build.as_tensor(source, op.dtype), len(indices) - 1
    if value.count != 1 or any(i is not None for i in indices[:first_dim]):
        raise NotKnown("putting several values by a mask, whose number differs between rows")
    mask = build.cast(indices[first_dim], "bool")
    rank = len(mask.shape)
    shape = (*mask.shape, *[1] * (len(op.shape) - first_dim - rank))
    mask = build.view(mask, shape, lambda own: own[:rank])
    number = build.view(value, (), lambda _: (constant(0),) * len(value.shape))
    new_value = build.map("add", [x, number], op.shape, op.dtype) if accumulate else number
    return select(build, op, mask, new_value, x)


def _scatter(
    build: Builder, op: Operator, x: Any, source: Tensor, picks: Sequence[Pick], how: str
) -> Tensor:
    """`x` after the elements of `source` are written over those at `picks` (`how` is "put"), or
    added to them ("sum")."""
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
    """`x` after a number is written over the elements at the indices in `index` along `dim`. Raises
    NotKnown if the indices differ between rows."""
    if not isinstance(index, torch.Tensor):
        raise NotKnown("filling at indices that differ between rows")
    is_filled = torch.zeros(x.shape[dim], dtype=torch.bool).index_fill(0, index, True)
    shape = [1] * len(x.shape)
    shape[dim % len(shape)] = x.shape[dim]
    number = build.as_tensor(value, op.dtype)
    return select(build, op, build.as_tensor(is_filled.view(shape)), number, x)


@lowers("bucketize", rows=row_rules.follow_search)
def bucketize(build: Builder, op: Operator, x: Any, edges: Any, /, right: bool = False) -> Tensor:
    """The number of the bin of each value: 0 below all edges. With `right`, a value that equals an
    edge is in the bin above it, otherwise in the one below."""
    return _search(build, op, x, edges, right)


@lowers("searchsorted", rows=row_rules.follow_search)
def searchsorted(
    build: Builder, op: Operator, edges: Any, x: Any, /, right: bool = False,
    side: str | None = None, sorter: Any = None,
) -> Tensor:  # fmt: skip
    """The index in `edges` at which each value would be inserted: before the edges that equal it,
    or behind them if `right` is true or `side` is "right". `sorter` has the indices that sort the
    edges; None if they are in order."""
    if sorter is not None:
        sorting = Operator.of("gather", edges.shape, dtype_name(edges))
        edges = gather(build, sorting, edges, -1, sorter)
    return _search(build, op, x, edges, right or side == "right")


def _search(build: Builder, op: Operator, x: Any, edges: Any, right: bool) -> Tensor:
    """The number of edges below each value; if `right`, of those below it or equal to it. For NaN
    it is the number of all edges.

    Constant edges in order are counted without branches: all edges less those behind the value.
    """
    dtype, count = common_dtype(x, edges), edges.shape[-1]
    values = build.expand(build.as_tensor(x, dtype), op.shape)
    is_behind = "gt" if right else "ge"  # a comparison of an edge with a value; false for NaN
    if isinstance(edges, torch.Tensor) and edges.dim() == 1 and _is_ascending(edges):
        shape = (*op.shape, count)
        spread = build.view(values, shape, lambda own: own[:-1])
        compared = build.map(is_behind, [edges, spread], shape, "bool", cast_to=dtype)
        edges_behind = add_reduction(build, "sum", build.cast(compared, op.dtype), -1, op.dtype)
        edges_behind.bounds = 0, count
        position = build.map("sub", [count, edges_behind], op.shape, op.dtype)
    else:
        position = _binary_search(build, op, values, build.as_tensor(edges, dtype), is_behind)
        position = build.cast(position, op.dtype)
    position.bounds = 0, count
    return position


def _is_ascending(edges: torch.Tensor) -> bool:
    """True if constant edges are in order, and none is NaN."""
    return bool((edges[:-1] <= edges[1:]).all()) and not bool(edges.isnan().any())


def _binary_search(
    build: Builder, op: Operator, values: Tensor, edges: Tensor, is_behind: str
) -> Tensor:
    """The position of each value among the edges, by torch's own search by halves, so that edges
    which are not in order give the same numbers as there. `is_behind`: the function that compares
    an edge with a value.

    Each pass of the loop halves the positions from `begin` to `end`. If none is left, it changes
    nothing; `middle` may then be outside, so it is moved inside before the edge is read.
    """
    count = edges.shape[-1]

    def map_int(function: str, *arguments: Any) -> Tensor:
        return build.map(function, arguments, op.shape, "int64")

    def map_bool(function: str, *arguments: Any, cast_to: str = "bool") -> Tensor:
        return build.map(function, arguments, op.shape, "bool", cast_to=cast_to)

    of_integers = Operator.of("where", op.shape, "int64")
    begin, end = (build.expand(build.as_tensor(n, "int64"), op.shape) for n in (0, count))
    lead_picks = [same_index(d) for d in range(len(edges.shape) - 1)]
    for _ in range(count.bit_length()):
        middle = map_int("bitwise_right_shift", map_int("add", begin, end), 1)
        inside = map_int("maximum", map_int("minimum", middle, count - 1), 0)
        edge = pick_elements(build, edges, op.shape, [*lead_picks, inside])
        any_left = map_bool("lt", begin, end, cast_to="int64")
        behind = map_bool(is_behind, edge, values, cast_to=values.dtype)
        goes_up = map_bool("bitwise_and", any_left, map_bool("bitwise_not", behind))
        begin = select(build, of_integers, goes_up, map_int("add", middle, 1), begin)
        end = select(build, of_integers, map_bool("bitwise_and", any_left, behind), middle, end)
    return begin
