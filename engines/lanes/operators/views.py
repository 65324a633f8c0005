"""Operators that only rearrange elements: each is a change of indices."""

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
    """`x` itself, unless in training."""
    if train and p:
        raise NotKnown("dropout while training")
    return x


@lowers("transpose", "t", "swapaxes", rows=shape_rules.follow_transpose)
def transpose(
    build: Builder, op: Operator, x: Tensor, first: int = 0, second: int = 1, /
) -> Tensor:
    """`x` with two dimensions exchanged; `t` gives only `x`, which may have fewer than two."""
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
    return build.expand(x, op.shape)


@lowers("broadcast_in_dim")
def broadcast_in_dim(
    build: Builder, op: Operator, x: Tensor, shape: Sequence[int], dims: Sequence[int], /
) -> Tensor:
    """A view with more axes: axis k of `x` is axis `dims[k]` of the result."""
    sizes = x.shape

    def where(index: Indices) -> Indices:
        axes = zip(sizes, dims, strict=True)
        return tuple(index[d] if size != 1 else constant(0) for size, d in axes)

    return build.view(x, op.shape, where)


def first_of_slice(start: Any, size: int) -> int:
    """The first index of a slice: counted from the end if negative, and then not outside."""
    if start is None:
        return 0
    if not isinstance(start, int) or (start < 0 and size == UNKNOWN):
        raise NotKnown("a slice whose begin depends on the number of items")
    if size == UNKNOWN:
        return start
    return min(max(start + size if start < 0 else start, 0), size)


def known_size(x: Tensor, dim: int) -> int:
    """The size of a dimension; NotKnown for the number of items of a collection."""
    if x.shape[dim] == UNKNOWN:
        raise NotKnown("an index counted from the end of the items")
    return x.shape[dim]


@lowers("slice", rows=shape_rules.follow_slice)
def slice_along(
    build: Builder, op: Operator, x: Tensor, dim: int = 0, start: Any = None, by: int = 1, /,
) -> Tensor:  # fmt: skip
    """Each `by`-th index along `dim`, from `start` on."""
    first = first_of_slice(start, x.shape[dim])
    return strided_view(build, x, op.shape, dim, first, by)


@lowers("select", rows=shape_rules.follow_select)
def select_index(build: Builder, op: Operator, x: Tensor, dim: int, at: int, /) -> Tensor:
    """The elements at one index along `dim`, without that dimension."""
    dim %= len(x.shape)
    if at < 0:
        at += known_size(x, dim)
    place = constant(at)
    return build.view(x, op.shape, lambda index: (*index[:dim], place, *index[dim:]))


@lowers("flip", rows=row_rules.follow_along_dims)
def flip(build: Builder, op: Operator, x: Tensor, /, dims: Sequence[int]) -> Tensor:
    """The elements in reverse order along some dimensions."""
    for dim in dims:
        x = strided_view(build, x, x.shape, dim, known_size(x, dim) - 1, by=-1)
    return x


@lowers("repeat", rows=shape_rules.follow_repeat)
def repeat(build: Builder, op: Operator, x: Tensor, times: Sequence[int], /) -> Tensor:
    """`x` several times along each axis."""
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
    """The diagonal of two axes, as the last axis."""
    row, column = dim1 % len(x.shape), dim2 % len(x.shape)

    def where(index: Indices) -> Indices:
        others, along = iter(index[:-1]), index[-1]
        place = {row: along + max(-offset, 0), column: along + max(offset, 0)}
        return tuple(place[d] if d in place else next(others) for d in range(len(x.shape)))

    return build.view(x, op.shape, where)


@lowers("unfold", rows=shape_rules.follow_unfold)
def unfold(build: Builder, op: Operator, x: Tensor, dim: int, by: int, /) -> Tensor:
    """Windows along `dim`, each `by` after the one before; a window is the last dimension."""
    dim %= len(x.shape)

    def where(index: Indices) -> Indices:
        return (*index[:dim], index[dim] * by + index[-1], *index[dim + 1 : -1])

    return build.view(x, op.shape, where)


@lowers("split", "split_with_sizes", "unbind", "chunk", rows=shape_rules.follow_split)
def split(build: Builder, op: Operator, x: Tensor, /, dim: int = 0) -> list[Tensor]:
    """Pieces along `dim`; with `unbind`, one for each index, without that axis."""
    if op.name == "unbind":
        selects = [Operator("select", (result,)) for result in op.results]
        return [select_index(build, select, x, dim, k) for k, select in enumerate(selects)]
    known_size(x, dim)  # refuses items
    pieces, first = [], 0
    for result in op.results:
        shape = shape_of(result)
        pieces.append(strided_view(build, x, shape, dim, first))
        first += shape[dim]
    return pieces


def strided_view(
    build: Builder, x: Tensor, shape: Sequence[int], dim: int, first: int, by: int = 1
) -> Tensor:
    """A view of this shape: its index i along `dim` is the index i * `by` + `first` of `x`."""
    dim %= len(x.shape)

    def where(index: Indices) -> Indices:
        return (*index[:dim], index[dim] * by + first, *index[dim + 1 :])

    return build.view(x, shape, where)


@lowers("cat", "stack", rows=shape_rules.follow_join)
def cat(build: Builder, op: Operator, tensors: Sequence[Any], /, dim: int = 0) -> Tensor:
    """Tensors one after the other along `dim`; with `stack`, along a new axis."""
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
        parts.append(Part(x, shift(dim, first)))
        first += x.shape[dim]
    if len(parts) == 1:
        return sources[0]
    return build.add(Assembly(build.values, op.shape, op.dtype, parts))


def _concatenate_items(build: Builder, op: Operator, sources: Sequence[Tensor], dim: int) -> Tensor:
    """A concatenation whose first dimension is items. Along it, the items of one collection come
    first, and then tensors of known sizes; NotKnown if it is otherwise."""
    if dim:
        return build.add(Beside(build.values, op.shape, sources, dim))
    lengths = [x.shape[0] for x in sources]
    count = build.count_of(op.results[0].shape[0] - sum(n for n in lengths if n != UNKNOWN))
    if lengths.count(UNKNOWN) != 1 or lengths[0] != UNKNOWN or count is None:
        raise NotKnown("items of several collections in one tensor")
    return build.add(Joined(build.values, op.shape, sources, count))


def shift(dim: int, by: int) -> Callable[[Indices], Indices]:
    """A change of indices: adds `by` along one dimension."""

    def place(index: Indices) -> Indices:
        return (*index[:dim], index[dim] + by, *index[dim + 1 :])

    return place


@lowers("constant_pad_nd", rows=shape_rules.follow_padding)
def pad(
    build: Builder, op: Operator, x: Tensor, sides: Sequence[int], /, value: float = 0
) -> Tensor:
    """`sides`: the widths before and behind for each dimension, the last dimension first. Negative
    widths cut elements off."""
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
    """The parts before and behind the inner tensor in each dimension, filled with a number. It has
    the shape `inner`, and begins at the index `first`."""
    number = build.as_tensor(value, op.dtype)
    for dim, (whole, size, begin) in enumerate(zip(op.shape, inner, first, strict=True)):
        end = begin + size
        for start, width in ((0, begin), (end, whole - end)):
            if width:
                shape = (*op.shape[:dim], width, *op.shape[dim + 1 :])
                yield Part(build.expand(number, shape), shift(dim, start))


@lowers("slice_scatter", "select_scatter", rows=shape_rules.follow_slice_scatter)
def overwrite_slice(
    build: Builder, op: Operator, x: Any, source: Any, dim: int = 0, start: Any = None,
    by: int = 1, /,
) -> Tensor:  # fmt: skip
    """`x` with `source` in place of a slice or of one index along `dim`."""
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
    """A tensor with the same number in all elements; one of torch, unless the number or the shape
    differs between calls."""
    value = 1 if "ones" in op.name else 0
    if "full" in op.name:
        value = fill_value
    tensor = build.as_tensor(value, op.dtype)
    if UNKNOWN in op.shape or hasattr(value, "dtype"):
        return build.expand(tensor, op.shape)
    return torch.full(op.shape, value, dtype=op.results[0].dtype)
