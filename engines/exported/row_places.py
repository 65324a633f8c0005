"""Where the rows lie in a tensor, and known facts of numbers that pick rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

# What an operator does to rows. In a message, these words follow the operator's name.
ACROSS = "works across the rows"
COUNT = "takes the number of rows as a value"
NUMBER = "takes the number of a row as a value"
UNKNOWN = "is an operator that is not known here"
SOME = "takes some of the rows"
WITH_OTHERS = "puts rows together with other rows"


class Mixed(Exception):
    """Rows may depend on each other. The text says what an operator does to them."""


class Unknown(Mixed):
    """The rules do not know what an operator does to rows."""


@dataclass(frozen=True)
class Rows:
    """Where the rows lie in a tensor. `n` is the symbol of the number of rows.

    Dimension `dim` has size `outer * n * inner + tail`. Its index (o * n + row) * inner + i belongs
    to a row, the last `tail` indices to no row. An element depends only on the input of its row.
    """

    n: Any
    dim: int
    outer: int = 1
    inner: int = 1
    tail: int = 0

    @property
    def extent(self) -> Any:
        """The size of dimension `dim`, as an expression of `n`."""
        return self.outer * self.inner * self.n + self.tail

    def fit(self, shape: Sequence[Any]) -> bool:
        """True if a tensor of this shape can have these rows, and no other size depends on n."""
        return all(
            size == self.extent if dim == self.dim else isinstance(size, int)
            for dim, size in enumerate(shape)
        )

    def at(self, dim: int) -> Rows:
        """The same rows in another dimension."""
        return replace(self, dim=dim)

    def moved(self, by: int) -> Rows:
        """The rows after `by` dimensions are put in front of them."""
        return self.at(self.dim + by)

    def without(self, dims: Sequence[int]) -> Rows:
        """The rows after these dimensions are removed. Raises Mixed if one of them has the rows."""
        if self.dim in dims:
            raise Mixed(SOME)
        return self.moved(-sum(dim < self.dim for dim in dims))


@dataclass(frozen=True)
class Numbers:
    """Integers of the form `base + step * row + c`, with c from `least` to `most`.

    `base` is an input column with one integer for each row; None means 0.
    """

    least: int
    most: int
    step: int = 0
    base: Node | None = None

    def plus(self, other: Numbers) -> Numbers | None:
        """The sum; None if both have a base."""
        if self.base and other.base:
            return None
        least, most = self.least + other.least, self.most + other.most
        return Numbers(least, most, self.step + other.step, self.base or other.base)

    def minus(self, other: Numbers) -> Numbers | None:
        """The difference; None if it is not of this form."""
        negative = other.times(Numbers(-1, -1))
        return None if negative is None else self.plus(negative)

    def times(self, other: Numbers) -> Numbers | None:
        """The product, if `other` is a single known number, else None."""
        if other.least != other.most or other.step or self.base or other.base:
            return None
        factor = other.least
        ends = (factor * self.least, factor * self.most)
        return Numbers(min(ends), max(ends), factor * self.step)

    def stay_in_their_row(self, rows: Rows) -> bool:
        """True if each number, used as an index of `rows`, points into its own row."""
        begins_at_its_row = rows.outer == 1 and self.step == rows.inner and self.base is None
        return begins_at_its_row and 0 <= self.least <= self.most < rows.inner


@dataclass(frozen=True)
class Value:
    """Known facts of a tensor. Without `rows` it depends neither on rows nor on their number.

    `padded`: a matrix with padding after the rows in use; only a slice of it has rows.
    `below`: for a bool tensor, a node of indices. True means: the index is an item of its row.
    `own`: for a tensor of indices, the symbol of a number of items m. Each index is an item of its
    row, or is at least m.
    """

    rows: Rows | None = None
    numbers: Numbers | None = None
    padded: bool = False
    below: Node | None = None
    own: Any = None

    @property
    def numbered(self) -> bool:
        """True if the values depend on the number of the row."""
        return self.numbers is not None and self.numbers.step != 0

    def placed(self, rows: Rows | None) -> Value:
        """The same elements with other `rows`, in other places than those that `below` knows."""
        return replace(self, rows=rows, below=None)

    def moved_rows(self, by: int) -> Rows | None:
        """The rows after `by` dimensions are put in front of them; None if there are no rows."""
        return None if self.rows is None else self.rows.moved(by)


def uniform(shape: Sequence[Any]) -> Rows | None:
    """The rows of a tensor with this shape, taken from its one symbolic size; None if it has none.
    Raises Mixed if the sizes are no multiple of a single symbol."""
    counts = [dim for dim, size in enumerate(shape) if not isinstance(size, int)]
    if not counts:
        return None
    factor, symbol = shape[counts[0]].as_coeff_Mul()
    if len(counts) > 1 or not symbol.is_Symbol or not factor.is_Integer:
        raise Mixed("makes a size of the number of rows")
    return Rows(symbol, counts[0], inner=int(factor))


def viewed(rows: Rows, before: Sequence[Any], after: Sequence[Any]) -> Rows:
    """The rows after a reshape. Raises Mixed if the new shape splits rows in another way."""
    if tuple(before) == tuple(after):
        return rows
    counts = [dim for dim, size in enumerate(after) if not isinstance(size, int)]
    if len(counts) == 1 and not rows.tail:
        (dim,) = counts
        # The elements keep their order. Sizes in front of n that are no dimensions of the new
        # shape are joined with it as `outer`, those behind it as `inner`.
        outer = _quotient([*before[: rows.dim], rows.outer], after[:dim])
        inner = _quotient([rows.inner, *before[rows.dim + 1 :]], after[dim + 1 :])
        if outer and inner:
            return Rows(rows.n, dim, outer, inner)
    raise Mixed("cuts rows into other pieces")


def _quotient(sizes: Sequence[int], others: Sequence[int]) -> int:
    """The product of `sizes` divided by the product of `others`; 0 if it is no integer."""
    product, divisor = math.prod(sizes), math.prod(others)
    return product // divisor if divisor and product % divisor == 0 else 0


def together(rows_of_each: Iterable[Rows | None]) -> Rows | None:
    """The common rows of all tensors that have rows; None if none has. Raises Mixed if they
    differ."""
    places = {rows for rows in rows_of_each if rows is not None}
    if len(places) > 1:
        raise Mixed(WITH_OTHERS)
    return next(iter(places), None)


def picked(
    tensor: Value, rank: int, indices: Mapping[int, Value], into: Rows | None, index_rank: int
) -> Value:
    """The facts of `tensor[indices]`, for a tensor of this rank. Raises Mixed.

    `indices` maps a dimension to its index tensor. `into`: the rows of the index tensors after
    broadcasting to `index_rank` dimensions. These dimensions replace the indexed dimensions if
    those are adjacent, else they come first.
    """
    dims = sorted(indices)
    adjacent = dims[-1] - dims[0] == len(dims) - 1
    first = dims[0] if adjacent else 0  # of the dimensions of the index tensors, in the result
    if into is not None:
        into = into.moved(first)
    rows = tensor.rows
    others = [index for dim, index in indices.items() if rows is None or dim != rows.dim]
    if tensor.numbered or any(index.numbered for index in others):
        raise Mixed(NUMBER)
    if rows is None:
        return Value(into)
    if rows.dim in indices:
        _require_own(rows, indices[rows.dim])
        return Value(into)
    kept_dims = [dim for dim in range(rank) if dim not in indices]
    place = kept_dims.index(rows.dim)
    if place >= first:  # behind the dimensions of the index tensors
        place += index_rank
    return Value(together([rows.at(place), into]))


def _require_own(rows: Rows, index: Value) -> None:
    """Raises Mixed unless each row picks only its own places or its own items."""
    own = False
    if index.rows is not None and not index.rows.tail:
        if index.rows.n == rows.n:
            own = index.numbers is not None and index.numbers.stay_in_their_row(rows)
        else:
            own = index.own == rows.n and (rows.outer, rows.inner) == (1, 1)
    if not own:
        raise Mixed("picks rows by an index")
