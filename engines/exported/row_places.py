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

    Dimension `dim` has size `outer * n * inner + tail`: all rows `outer` times, in each of which a
    row has `inner` successive places, and then `tail` places of no row. So the index
    `(o * n + row) * inner + i` belongs to `row`. An element depends only on the input of its row.
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

    def fits_shape(self, shape: Sequence[Any]) -> bool:
        """Return whether a tensor of this shape can have these rows.

        Dimension `dim` must have the size `extent`, and no other size may depend on n.
        """
        return all(
            size == self.extent if dim == self.dim else isinstance(size, int)
            for dim, size in enumerate(shape)
        )

    def at(self, dim: int) -> Rows:
        """The same rows in another dimension."""
        return replace(self, dim=dim)

    def moved(self, by: int) -> Rows:
        """The rows once `by` dimensions are put in front of them."""
        return self.at(self.dim + by)

    def without(self, dims: Sequence[int]) -> Rows:
        """The rows once these dimensions are removed; raises Mixed if they lie in one of them."""
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
        """The sum of both. None if it is not of this form, because both have a base."""
        if self.base and other.base:
            return None
        least, most = self.least + other.least, self.most + other.most
        return Numbers(least, most, self.step + other.step, self.base or other.base)

    def minus(self, other: Numbers) -> Numbers | None:
        """The difference of both; None if it is not of this form."""
        negative = other.times(Numbers(-1, -1))
        return None if negative is None else self.plus(negative)

    def times(self, other: Numbers) -> Numbers | None:
        """The product of both; None unless `other` is a single known number."""
        if other.least != other.most or other.step or self.base or other.base:
            return None
        factor = other.least
        ends = (factor * self.least, factor * self.most)
        return Numbers(min(ends), max(ends), factor * self.step)

    def stay_in_their_row(self, rows: Rows) -> bool:
        """Return whether each number, used as an index along `rows`, points into its own row."""
        begins_at_its_row = rows.outer == 1 and self.step == rows.inner and self.base is None
        return begins_at_its_row and 0 <= self.least <= self.most < rows.inner


@dataclass(frozen=True)
class Value:
    """What is known of a tensor. If `rows` is None, it depends neither on rows nor on their number.

    `numbers`: what is known of the elements, if they are integers.
    `padded`: the tensor is a matrix with padding after the rows in use; only a slice has rows.
    `below`: of a tensor of bools, the node of a tensor of indices. Where the bool is true, the
    index is that of an item that belongs to the row.
    `own`: of a tensor of indices, the symbol of the number of items m. Each index is that of an
    item that belongs to the row, or is at least m.
    """

    rows: Rows | None = None
    numbers: Numbers | None = None
    padded: bool = False
    below: Node | None = None
    own: Any = None

    @property
    def numbered(self) -> bool:
        """True if the elements depend on which number a row has."""
        return self.numbers is not None and self.numbers.step != 0

    def with_rows(self, rows: Rows | None) -> Value:
        """The facts once the elements are moved so that their rows lie at `rows`.

        `below` is dropped, since its indices belong to the places before.
        """
        return replace(self, rows=rows, below=None)

    def moved_rows(self, by: int) -> Rows | None:
        """The rows once `by` dimensions are put in front of them; None if there are no rows."""
        return None if self.rows is None else self.rows.moved(by)


def rows_of_shape(shape: Sequence[Any]) -> Rows | None:
    """Find the rows of a tensor from its shape: `(n, 4)` has them in dimension 0.

    A size such as `3 * n` counts as n rows of 3 places each. None if every size is a number. Raises
    Mixed if two sizes are expressions, or one is no multiple of a symbol.
    """
    row_dims = [dim for dim, size in enumerate(shape) if not isinstance(size, int)]
    if not row_dims:
        return None
    factor, symbol = shape[row_dims[0]].as_coeff_Mul()
    if len(row_dims) > 1 or not symbol.is_Symbol or not factor.is_Integer:
        raise Mixed("makes a size of the number of rows")
    return Rows(symbol, row_dims[0], inner=int(factor))


def follow_view(rows: Rows, before: Sequence[Any], after: Sequence[Any]) -> Rows:
    """Find where the rows lie after a reshape from shape `before` to shape `after`.

    Raises Mixed if the new shape divides the rows differently.
    """
    if tuple(before) == tuple(after):
        return rows
    row_dims = [dim for dim, size in enumerate(after) if not isinstance(size, int)]
    if len(row_dims) == 1 and not rows.tail:
        (dim,) = row_dims
        # The elements keep their order. So the new dimension of the rows has as `outer` what it
        # takes from the sizes in front of n, and as `inner` what it takes from those behind it:
        # (2, n, 3) -> (2 * n, 3) has outer = 2, and (2, n, 3) -> (2, n * 3) has inner = 3.
        outer = _divide_products([*before[: rows.dim], rows.outer], after[:dim])
        inner = _divide_products([rows.inner, *before[rows.dim + 1 :]], after[dim + 1 :])
        if outer and inner:
            return Rows(rows.n, dim, outer, inner)
    raise Mixed("cuts rows into other pieces")


def _divide_products(sizes: Sequence[int], others: Sequence[int]) -> int:
    """Divide the product of `sizes` by the product of `others`; return 0 if this is no integer."""
    product, divisor = math.prod(sizes), math.prod(others)
    return product // divisor if divisor and product % divisor == 0 else 0


def common_rows(rows_of_each: Iterable[Rows | None]) -> Rows | None:
    """Return the rows that several tensors have in common.

    A tensor without rows (None) does not count; None if no tensor has rows. Raises Mixed if the
    rows of two tensors lie differently.
    """
    different = {rows for rows in rows_of_each if rows is not None}
    if len(different) > 1:
        raise Mixed(WITH_OTHERS)
    return next(iter(different), None)


def follow_indexing(
    tensor: Value, rank: int, indices: Mapping[int, Value], into: Rows | None, index_rank: int
) -> Value:
    """Find the facts of `tensor[indices]`, where `tensor` has `rank` dimensions.

    `indices` maps a dimension to the facts of its index tensor. `into` says where the rows of the
    index tensors lie once these are broadcast to `index_rank` dimensions. In the result, these
    dimensions replace the indexed dimensions if those are adjacent, else they come first.
    Raises Mixed if a row may get elements of another row, or its own number as a value.
    """
    dims = sorted(indices)
    adjacent = dims[-1] - dims[0] == len(dims) - 1
    index_dim = dims[0] if adjacent else 0  # where the dimensions of the index tensors begin
    if into is not None:
        into = into.moved(index_dim)
    rows = tensor.rows
    other_indices = [index for dim, index in indices.items() if rows is None or dim != rows.dim]
    if tensor.numbered or any(index.numbered for index in other_indices):
        raise Mixed(NUMBER)
    if rows is None:
        return Value(into)
    if rows.dim in indices:
        _require_own_places(rows, indices[rows.dim])
        return Value(into)
    kept_dims = [dim for dim in range(rank) if dim not in indices]
    new_dim = kept_dims.index(rows.dim)
    if new_dim >= index_dim:  # behind the dimensions of the index tensors
        new_dim += index_rank
    return Value(common_rows([rows.at(new_dim), into]))


def _require_own_places(rows: Rows, index: Value) -> None:
    """Raise Mixed unless an index along `rows` picks only places, or items, of its own row."""
    is_own = False
    if index.rows is not None and not index.rows.tail:
        if index.rows.n == rows.n:
            is_own = index.numbers is not None and index.numbers.stay_in_their_row(rows)
        else:
            is_own = index.own == rows.n and (rows.outer, rows.inner) == (1, 1)
    if not is_own:
        raise Mixed("picks rows by an index")
