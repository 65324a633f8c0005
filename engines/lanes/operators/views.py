"""Operators that only rearrange elements: each is a change of indices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from engines.exported import row_rules, shape_rules
from engines.lanes.index import Indices, constant, reshaped
from engines.lanes.operators.registry import Operator, lowers, sizes
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import UNKNOWN, Assembly, Beside, Joined, Part
from engines.lanes.values import Shape, Tensor


@lowers("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "unflatten",
        "flatten", rows=shape_rules.reshaped)  # fmt: skip
def reshape(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    shape, before = op.shape, x.shape
    if shape == before:
        return x
    return build.view(x, shape, lambda index: reshaped(index, shape, before))


@lowers("alias", "detach", "clone", "contiguous", "lift_fresh_copy", "positive",
        "lift_fresh", rows=row_rules.same)  # fmt: skip
def same(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    return x


@lowers("dropout", rows=row_rules.dropped)
def dropout(build: Builder, op: Operator, x: Tensor, p: float, train: bool, /) -> Tensor:
    if train and p:
        raise NotKnown("dropout while training")
    return x


@lowers("transpose", "t", "swapaxes", rows=shape_rules.transposed)
def transpose(
    build: Builder, op: Operator, x: Tensor, first: int = 0, second: int = 1, /
) -> Tensor:
    order = list(range(len(x.shape)))
    if len(order) > 1:
        order[first], order[second] = order[second], order[first]
    return permute(build, op, x, order)


@lowers("permute", rows=shape_rules.permuted)
def permute(build: Builder, op: Operator, x: Tensor, /, dims: Sequence[int]) -> Tensor:
    rank = len(x.shape)
    order = [d % rank for d in dims]
    back = [order.index(d) for d in range(rank)]
    return build.view(x, op.shape, lambda index: tuple(index[d] for d in back))


@lowers("expand", rows=shape_rules.expanded)
def expand(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    return build.expand(x, op.shape)


@lowers("broadcast_in_dim")
def broadcast_in_dim(
    build: Builder, op: Operator, x: Tensor, shape: Sequence[int], dims: Sequence[int], /
) -> Tensor:
    """A view with more axes: axis k of `x` is axis `dims[k]` of the result."""
    own = x.shape

    def where(index: Indices) -> Indices:
        return tuple(index[d] if own[k] != 1 else constant(0) for k, d in enumerate(dims))

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


@lowers("slice", rows=shape_rules.sliced)
def cut(
    build: Builder, op: Operator, x: Tensor, dim: int = 0, start: Any = None, by: int = 1, /,
) -> Tensor:  # fmt: skip
    first = first_of_slice(start, x.shape[dim])
    return moved(build, x, op.shape, dim, lambda i: i * by + first)


@lowers("select", rows=shape_rules.selected)
def pick(build: Builder, op: Operator, x: Tensor, dim: int, at: int, /) -> Tensor:
    dim %= len(x.shape)
    if at < 0:
        at += known_size(x, dim)
    place = constant(at)
    return build.view(x, op.shape, lambda index: (*index[:dim], place, *index[dim:]))


@lowers("flip", rows=row_rules.along)
def flip(build: Builder, op: Operator, x: Tensor, /, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        last = known_size(x, dim) - 1
        x = moved(build, x, x.shape, dim, lambda i, last=last: i * -1 + last)
    return x


@lowers("repeat", rows=shape_rules.repeated)
def repeat(build: Builder, op: Operator, x: Tensor, times: Sequence[int], /) -> Tensor:
    """`x` several times along each axis."""
    lacking, own = len(times) - len(x.shape), x.shape
    if own[:1] == (UNKNOWN,) and times[lacking] != 1:
        raise NotKnown("repeated items")

    def where(index: Indices) -> Indices:
        return tuple(i % size for i, size in zip(index[lacking:], own, strict=True))

    return build.view(x, op.shape, where)


@lowers("diagonal", rows=shape_rules.diagonal)
def diagonal(
    build: Builder, op: Operator, x: Tensor, /, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    """The diagonal of two axes, as the last axis."""
    a, b = dim1 % len(x.shape), dim2 % len(x.shape)

    def where(index: Indices) -> Indices:
        others, along = iter(index[:-1]), index[-1]
        ends = {a: along + max(-offset, 0), b: along + max(offset, 0)}
        return tuple(ends[d] if d in ends else next(others) for d in range(len(x.shape)))

    return build.view(x, op.shape, where)


@lowers("unfold", rows=shape_rules.unfolded)
def unfold(build: Builder, op: Operator, x: Tensor, dim: int, by: int, /) -> Tensor:
    dim %= len(x.shape)

    def where(index: Indices) -> Indices:
        return (*index[:dim], index[dim] * by + index[-1], *index[dim + 1 : -1])

    return build.view(x, op.shape, where)


@lowers("split", "split_with_sizes", "unbind", "chunk", rows=shape_rules.split)
def split(build: Builder, op: Operator, x: Tensor, /, dim: int = 0) -> list[Tensor]:
    """Pieces along `dim`; with `unbind`, one for each index, without that axis."""
    if op.name == "unbind":
        each = [Operator("select", (result,)) for result in op.results]
        return [pick(build, one, x, dim, k) for k, one in enumerate(each)]
    known_size(x, dim)
    found, first = [], 0
    for result in op.results:
        shape = sizes(result)
        found.append(moved(build, x, shape, dim, lambda i, first=first: i + first))
        first += shape[dim]
    return found


def moved(build: Builder, x: Tensor, shape: Sequence[int], dim: int, to: Any) -> Tensor:
    """A view whose index along one dimension is changed by the function `to`."""
    dim %= len(x.shape)

    def where(index: Indices) -> Indices:
        return (*index[:dim], to(index[dim]), *index[dim + 1 :])

    return build.view(x, shape, where)


@lowers("cat", "stack", rows=shape_rules.joined)
def cat(build: Builder, op: Operator, tensors: Sequence[Any], /, dim: int = 0) -> Tensor:
    """Tensors one after the other along `dim`; with `stack`, along a new axis."""
    given = [build.tensor(x, op.dtype) for x in tensors]
    dim %= len(op.shape)
    if op.name == "stack":
        shape = (*op.shape[:dim], 1, *op.shape[dim + 1 :])
        given = [
            build.view(x, shape, lambda index: (*index[:dim], *index[dim + 1 :])) for x in given
        ]
    given = [x for x in given if x.count]
    if UNKNOWN in op.shape:
        return _of_items(build, op, given, dim)
    parts, first = [], 0
    for x in given:
        parts.append(Part(x, shift(dim, first)))
        first += x.shape[dim]
    if len(parts) == 1:
        return given[0]
    return build.add(Assembly(build.values, op.shape, op.dtype, parts))


def _of_items(build: Builder, op: Operator, given: Sequence[Tensor], dim: int) -> Tensor:
    if dim:
        return build.add(Beside(build.values, op.shape, given, dim))
    lengths = [x.shape[0] for x in given]
    count = build.count_of(op.results[0].shape[0] - sum(n for n in lengths if n != UNKNOWN))
    if lengths.count(UNKNOWN) != 1 or lengths[0] != UNKNOWN or count is None:
        raise NotKnown("items of several collections in one tensor")
    return build.add(Joined(build.values, op.shape, given, count))


def shift(dim: int, by: int) -> Any:
    """A change of indices: adds `by` along one dimension."""

    def place(index: Indices) -> Indices:
        return (*index[:dim], index[dim] + by, *index[dim + 1 :])

    return place


@lowers("constant_pad_nd", rows=shape_rules.edged)
def pad(
    build: Builder, op: Operator, x: Tensor, sides: Sequence[int], /, value: float = 0
) -> Tensor:
    """`sides`: the widths before and behind for each dimension, the last dimension first. Negative
    widths cut elements off."""
    pairs = [(sides[k], sides[k + 1]) for k in range(0, len(sides), 2)]
    for k, (before, behind) in enumerate(pairs):
        dim = len(x.shape) - 1 - k
        cut_off = max(-before, 0)
        kept = x.shape[dim] - cut_off - max(-behind, 0)
        shape = (*x.shape[:dim], kept, *x.shape[dim + 1 :])
        x = moved(build, x, shape, dim, lambda i, by=cut_off: i + by) if shape != x.shape else x
    if x.shape == op.shape:
        return x
    first = [0] * len(x.shape)
    for k, (before, _) in enumerate(pairs):
        first[len(x.shape) - 1 - k] = max(before, 0)

    def place(index: Indices) -> Indices:
        return tuple(i + by for i, by in zip(index, first, strict=True))

    parts = [*_around(build, op, x.shape, first, value), Part(build.cast(x, op.dtype), place)]
    return build.add(Assembly(build.values, op.shape, op.dtype, parts))


def _around(
    build: Builder, op: Operator, inner: Shape, first: Sequence[int], value: float
) -> Iterator[Part]:
    """The parts before and behind the inner tensor in each dimension, filled with a number."""
    number = build.tensor(value, op.dtype)
    for dim, (whole, size, begin) in enumerate(zip(op.shape, inner, first, strict=True)):
        end = begin + size
        for start, width in ((0, begin), (end, whole - end)):
            if width:
                shape = (*op.shape[:dim], width, *op.shape[dim + 1 :])
                yield Part(build.expand(number, shape), shift(dim, start))


@lowers("slice_scatter", "select_scatter", rows=shape_rules.put_in)
def put(
    build: Builder, op: Operator, x: Any, source: Any, dim: int = 0, start: Any = None,
    by: int = 1, /,
) -> Tensor:  # fmt: skip
    """`x` with `source` in place of a slice or of one index along `dim`."""
    dim %= len(op.shape)
    first = first_of_slice(start, op.shape[dim])
    other = build.tensor(source, op.dtype)
    if other.shape == op.shape:
        return other
    if not other.count:
        return build.tensor(x, op.dtype)

    def place(index: Indices) -> Indices:
        if op.name == "select_scatter":
            return (*index[:dim], constant(first), *index[dim:])
        return (*index[:dim], index[dim] * by + first, *index[dim + 1 :])

    parts = [Part(build.tensor(x, op.dtype), lambda index: index), Part(other, place)]
    return build.add(Assembly(build.values, op.shape, op.dtype, parts))


@lowers("copy", rows=row_rules.pointwise)
def copy(build: Builder, op: Operator, source: Any, /) -> Tensor:
    return build.expand(build.tensor(source, op.dtype), op.shape)


@lowers("full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full", "empty_like",
        "new_empty", "full", "zeros", "ones", rows=shape_rules.filled)  # fmt: skip
def filled(build: Builder, op: Operator, /, fill_value: Any = None) -> Any:
    """A tensor with the same number in all elements."""
    value = fill_value if "full" in op.name else int("ones" in op.name)
    tensor = build.tensor(value, op.dtype)
    if UNKNOWN in op.shape:
        return build.expand(tensor, op.shape)
    if hasattr(value, "dtype"):
        return build.expand(tensor, op.shape)
    return torch.full(op.shape, value, dtype=op.results[0].dtype)
