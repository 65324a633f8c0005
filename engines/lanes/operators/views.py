"""Operators that only rearrange elements: each changes indices, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from engines.exported import row_rules, shape_rules
from engines.lanes.index import Indices, constant, reshaped
from engines.lanes.operators.registry import Operator, lowers, shape_of
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import UNKNOWN, Assembly, Beside, Joined, Part
from engines.lanes.values import Shape, Tensor


@lowers("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "unflatten",
        "flatten", rows=shape_rules.follow_reshape)  # fmt: skip
def reshape(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    """The same elements in the same order, in another shape."""
    shape, before = op.shape, x.shape
    if shape == before:
        return x
    return build.view(x, shape, lambda index: reshaped(index, shape, before))


@lowers("alias", "detach", "clone", "contiguous", "lift_fresh_copy", "positive",
        "lift_fresh", rows=row_rules.follow_same_elements)  # fmt: skip
def unchanged(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    """`x` itself: an operator that changes no element."""
    return x


@lowers("dropout", rows=row_rules.follow_dropout)
def dropout(build: Builder, op: Operator, x: Tensor, p: float, train: bool, /) -> Tensor:
    """`x` itself. Raises NotKnown for dropout during training, with a probability above 0."""
    if train and p:
        raise NotKnown("dropout while training")
    return x


@lowers("transpose", "t", "swapaxes", rows=shape_rules.follow_transpose)
def transpose(
    build: Builder, op: Operator, x: Tensor, first: int = 0, second: int = 1, /
) -> Tensor:
    """`x` with two dimensions exchanged. `t` names none: it exchanges the first two, and leaves a
    vector or a number as it is."""
    order = list(range(len(x.shape)))
    if len(order) > 1:
        order[first], order[second] = order[second], order[first]
    return permute(build, op, x, order)


@lowers("permute", rows=shape_rules.follow_permute)
def permute(build: Builder, op: Operator, x: Tensor, /, dims: Sequence[int]) -> Tensor:
    """The dimensions of `x` in another order: dimension k of the result is `dims[k]` of `x`."""
    rank = len(x.shape)
    order = [d % rank for d in dims]
    inverse = [order.index(d) for d in range(rank)]
    return build.view(x, op.shape, lambda index: tuple(index[d] for d in inverse))


@lowers("expand", rows=shape_rules.follow_expand)
def expand(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    """`x`, broadcast to the shape of the result."""
    return build.expand(x, op.shape)


@lowers("broadcast_in_dim")
def broadcast_in_dim(
    build: Builder, op: Operator, x: Tensor, shape: Sequence[int], dims: Sequence[int], /
) -> Tensor:
    """A view with more dimensions: dimension k of `x` is dimension `dims[k]` of the result."""
    sizes = x.shape

    def where(index: Indices) -> Indices:
        own_dims = zip(sizes, dims, strict=True)
        return tuple(index[d] if size != 1 else constant(0) for size, d in own_dims)

    return build.view(x, op.shape, where)


def first_of_slice(start: Any, size: int) -> int:
    """The first index of a slice of a dimension with this size. A negative `start` counts from the
    end; one that is outside is moved to the nearest end; None is 0.

    Raises NotKnown if the index depends on the number of items of a collection.
    """
    if start is None:
        return 0
    if not isinstance(start, int) or (start < 0 and size == UNKNOWN):
        raise NotKnown("a slice whose begin depends on the number of items")
    if size == UNKNOWN:
        return start
    return min(max(start + size if start < 0 else start, 0), size)


def known_size(x: Tensor, dim: int) -> int:
    """The size of a dimension. Raises NotKnown if it is the number of items of a collection."""
    if x.shape[dim] == UNKNOWN:
        raise NotKnown("an index counted from the end of the items")
    return x.shape[dim]


@lowers("slice", rows=shape_rules.follow_slice)
def slice_along(
    build: Builder, op: Operator, x: Tensor, dim: int = 0, start: Any = None, by: int = 1, /,
) -> Tensor:  # fmt: skip
    """The elements at each `by`-th index along `dim`, from `start` on."""
    first = first_of_slice(start, x.shape[dim])
    return strided_view(build, x, op.shape, dim, first, by)


@lowers("select", rows=shape_rules.follow_select)
def select_index(build: Builder, op: Operator, x: Tensor, dim: int, at: int, /) -> Tensor:
    """The elements at index `at` along `dim`, without that dimension. A negative index counts from
    the end."""
    dim %= len(x.shape)
    if at < 0:
        at += known_size(x, dim)
    selected = constant(at)
    return build.view(x, op.shape, lambda index: (*index[:dim], selected, *index[dim:]))


@lowers("flip", rows=row_rules.follow_along_dims)
def flip(build: Builder, op: Operator, x: Tensor, /, dims: Sequence[int]) -> Tensor:
    """The elements in reverse order along each of `dims`."""
    for dim in dims:
        x = strided_view(build, x, x.shape, dim, known_size(x, dim) - 1, by=-1)
    return x


@lowers("repeat", rows=shape_rules.follow_repeat)
def repeat(build: Builder, op: Operator, x: Tensor, times: Sequence[int], /) -> Tensor:
    """`x`, repeated `times[d]` times along each dimension d of the result. If that has more
    dimensions than `x`, the additional ones come first."""
    lacking, sizes = len(times) - len(x.shape), x.shape
    if sizes[:1] == (UNKNOWN,) and times[lacking] != 1:
        raise NotKnown("repeated items")

    def where(index: Indices) -> Indices:
        return tuple(i % size for i, size in zip(index[lacking:], sizes, strict=True))

    return build.view(x, op.shape, where)


@lowers("diagonal", rows=shape_rules.follow_diagonal)
def diagonal(
    build: Builder, op: Operator, x: Tensor, /, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    """The diagonal of each matrix in `x`, as the last dimension. `dim1` and `dim2` are the rows and
    the columns; the diagonal begins at column `offset`, or if it is negative at row -`offset`."""
    row, column = dim1 % len(x.shape), dim2 % len(x.shape)

    def where(index: Indices) -> Indices:
        others, along = iter(index[:-1]), index[-1]
        by_dim = {row: along + max(-offset, 0), column: along + max(offset, 0)}
        return tuple(by_dim[d] if d in by_dim else next(others) for d in range(len(x.shape)))

    return build.view(x, op.shape, where)


@lowers("unfold", rows=shape_rules.follow_unfold)
def unfold(build: Builder, op: Operator, x: Tensor, dim: int, by: int, /) -> Tensor:
    """Windows along `dim`, each of which begins `by` elements after the one before. The elements of
    a window are along the last dimension."""
    dim %= len(x.shape)

    def where(index: Indices) -> Indices:
        return (*index[:dim], index[dim] * by + index[-1], *index[dim + 1 : -1])

    return build.view(x, op.shape, where)


@lowers("split", "split_with_sizes", "unbind", "chunk", rows=shape_rules.follow_split)
def split(build: Builder, op: Operator, x: Tensor, /, dim: int = 0) -> list[Tensor]:
    """The pieces of `x` along `dim`, which have the shapes of the results. `unbind` gives a piece
    for each index, without that dimension."""
    if op.name == "unbind":
        selects = [Operator("select", (result,)) for result in op.results]
        return [select_index(build, select, x, dim, k) for k, select in enumerate(selects)]
    known_size(x, dim)  # refuses a dimension of items
    pieces, first = [], 0
    for result in op.results:
        shape = shape_of(result)
        pieces.append(strided_view(build, x, shape, dim, first))
        first += shape[dim]
    return pieces


def strided_view(
    build: Builder, x: Tensor, shape: Sequence[int], dim: int, first: int, by: int = 1
) -> Tensor:
    """A view of this shape, whose index i along `dim` is index i * `by` + `first` of `x`."""
    dim %= len(x.shape)

    def where(index: Indices) -> Indices:
        return (*index[:dim], index[dim] * by + first, *index[dim + 1 :])

    return build.view(x, shape, where)


@lowers("cat", "stack", rows=shape_rules.follow_join)
def cat(build: Builder, op: Operator, tensors: Sequence[Any], /, dim: int = 0) -> Tensor:
    """The tensors one after the other along `dim`; with `stack`, along a new dimension."""
    sources = [build.as_tensor(x, op.dtype) for x in tensors]
    dim %= len(op.shape)
    if op.name == "stack":
        shape = (*op.shape[:dim], 1, *op.shape[dim + 1 :])
        sources = [
            build.view(x, shape, lambda index: (*index[:dim], *index[dim + 1 :])) for x in sources
        ]
    sources = [x for x in sources if x.count]
    if UNKNOWN in op.shape:
        return _concatenate_items(build, op, sources, dim)
    parts, first = [], 0
    for x in sources:
        parts.append(Part(x, shifted_along(dim, first)))
        first += x.shape[dim]
    if len(parts) == 1:
        return sources[0]
    return build.add(Assembly(build.values, op.shape, op.dtype, parts))


def _concatenate_items(build: Builder, op: Operator, sources: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenates tensors along `dim` if the result's first dimension has items of a collection.

    If `dim` is the first dimension itself, the items of one collection must come first, and then
    only tensors of known sizes; otherwise it raises NotKnown.
    """
    if dim:
        return build.add(Beside(build.values, op.shape, sources, dim))
    lengths = [x.shape[0] for x in sources]
    known_length = sum(length for length in lengths if length != UNKNOWN)
    count = build.count_of(op.results[0].shape[0] - known_length)
    if lengths.count(UNKNOWN) != 1 or lengths[0] != UNKNOWN or count is None:
        raise NotKnown("items of several collections in one tensor")
    return build.add(Joined(build.values, op.shape, sources, count))


def shifted_along(dim: int, by: int) -> Callable[[Indices], Indices]:
    """A function that adds `by` to an index along one dimension."""

    def place(index: Indices) -> Indices:
        return (*index[:dim], index[dim] + by, *index[dim + 1 :])

    return place


@lowers("constant_pad_nd", rows=shape_rules.follow_padding)
def pad(
    build: Builder, op: Operator, x: Tensor, sides: Sequence[int], /, value: float = 0
) -> Tensor:
    """`x` with `value` around it. `sides` are the widths before and behind of the last dimension,
    then those of the one before it, and so on. Negative widths cut elements off."""
    rank = len(x.shape)
    widths = {rank - 1 - k // 2: (sides[k], sides[k + 1]) for k in range(0, len(sides), 2)}
    for dim, (before, behind) in widths.items():
        cut_off = max(-before, 0)
        size = x.shape[dim] - cut_off - max(-behind, 0)
        if size != x.shape[dim]:
            shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
            x = strided_view(build, x, shape, dim, cut_off)
    if x.shape == op.shape:
        return x
    first = [max(widths[dim][0], 0) if dim in widths else 0 for dim in range(rank)]

    def place(index: Indices) -> Indices:
        return tuple(i + begin for i, begin in zip(index, first, strict=True))

    parts = [*_parts_around(build, op, x.shape, first, value), Part(build.cast(x, op.dtype), place)]
    return build.add(Assembly(build.values, op.shape, op.dtype, parts))


def _parts_around(
    build: Builder, op: Operator, inner: Shape, first: Sequence[int], value: float
) -> Iterator[Part]:
    """Yields the parts of a padded tensor that are filled with `value`: those before and behind the
    inner tensor in each dimension. This has the shape `inner`, and begins at the index `first`."""
    number = build.as_tensor(value, op.dtype)
    for dim, (whole, size, begin) in enumerate(zip(op.shape, inner, first, strict=True)):
        end = begin + size
        for start, width in ((0, begin), (end, whole - end)):
            if width:
                shape = (*op.shape[:dim], width, *op.shape[dim + 1 :])
                yield Part(build.expand(number, shape), shifted_along(dim, start))


@lowers("slice_scatter", "select_scatter", rows=shape_rules.follow_slice_scatter)
def overwrite_slice(
    build: Builder, op: Operator, x: Any, source: Any, dim: int = 0, start: Any = None,
    by: int = 1, /,
) -> Tensor:  # fmt: skip
    """`x` with `source` in place of each `by`-th index along `dim` from `start` on, or with
    `select_scatter`, of the one index `start`."""
    dim %= len(op.shape)
    first = first_of_slice(start, op.shape[dim])
    inserted = build.as_tensor(source, op.dtype)
    if inserted.shape == op.shape:
        return inserted
    if not inserted.count:
        return build.as_tensor(x, op.dtype)

    def place(index: Indices) -> Indices:
        if op.name == "select_scatter":
            return (*index[:dim], constant(first), *index[dim:])
        return (*index[:dim], index[dim] * by + first, *index[dim + 1 :])

    parts = [Part(build.as_tensor(x, op.dtype), lambda index: index), Part(inserted, place)]
    return build.add(Assembly(build.values, op.shape, op.dtype, parts))


@lowers("copy", rows=row_rules.follow_pointwise)
def copy(build: Builder, op: Operator, source: Any, /) -> Tensor:
    """`source`, expanded to the shape of the tensor that it overwrites."""
    return build.expand(build.as_tensor(source, op.dtype), op.shape)


@lowers("full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full", "empty_like",
        "new_empty", "full", "zeros", "ones", rows=shape_rules.follow_fill)  # fmt: skip
def fill(build: Builder, op: Operator, /, fill_value: Any = None) -> Any:
    """A tensor whose elements are all the same number. It is one of torch, unless the number is
    computed by the program or the shape depends on a number of items."""
    value = 1 if "ones" in op.name else 0
    if "full" in op.name:
        value = fill_value
    tensor = build.as_tensor(value, op.dtype)
    if UNKNOWN in op.shape or hasattr(value, "dtype"):
        return build.expand(tensor, op.shape)
    return torch.full(op.shape, value, dtype=op.results[0].dtype)
