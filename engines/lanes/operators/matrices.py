"""Factors of small matrices, and systems of equations with a triangular matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engines.exported import row_rules
from engines.lanes.index import Indices, constant
from engines.lanes.operators.pointwise import select
from engines.lanes.operators.registry import Operator, lowers
from engines.lanes.operators.views import transpose
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import Assembly, Part
from engines.lanes.values import Tensor

_LARGEST = 16  # rows of a matrix: the code has a step for each pair of columns


@lowers("linalg_cholesky_ex", rows=row_rules.follow_matrices)
def cholesky(build: Builder, op: Operator, x: Tensor, /, upper: bool = False) -> list[Tensor]:
    """The Cholesky factor of each matrix, and the number, counted from 1, of the first column whose
    pivot is not positive (0 if all are). From that column on the factor is NaN.

    Column j of the factor L is computed from column j of the matrix. L[j:, k] * L[j, k] is
    subtracted for each column k before it, and the rest is divided by the square root of its first
    element, the pivot.
    """
    size = _size_if_small(x)
    x = _transpose(build, x) if upper else x  # only this triangle is read
    columns: list[Tensor] = []  # column k holds the rows from k on
    info = build.expand(build.as_tensor(0, "int32"), op.shape[:-2])
    for j in range(size):
        shape = (*op.shape[:-2], size - j)
        rest: Tensor = _take_rows_from(build, _take_column(build, x, j), j)
        for k, column in enumerate(columns):
            lower_rows = _take_rows_from(build, column, j - k)
            factor = _take_first_row(build, lower_rows)
            product = build.map("mul", [lower_rows, factor], shape, op.dtype)
            rest = build.map("sub", [rest, product], shape, op.dtype)
        pivot = _take_first_row(build, rest)
        root = build.map("sqrt", [pivot], pivot.shape, op.dtype)
        columns.append(build.map("div", [rest, root], shape, op.dtype))
        info = _update_info(build, info, rest, j)
    parts = [Part(column, _index_in_column(k)) for k, column in enumerate(columns)]
    zeros = build.expand(build.as_tensor(0.0, op.dtype), op.shape)
    parts.insert(0, Part(zeros, lambda index: index))
    lower: Tensor = build.add(Assembly(build.values, op.shape, op.dtype, parts))
    return [_transpose(build, lower) if upper else lower, info]


def _update_info(build: Builder, info: Tensor, rest: Tensor, column: int) -> Tensor:
    """Returns `info` after one more column: the number, counted from 1, of the first column whose
    pivot is not positive; 0 if there is none so far. `rest` begins with the column's pivot."""
    shape, rank = info.shape, len(info.shape)
    pivot = build.view(rest, shape, lambda index: (*index[:rank], constant(0)))
    is_positive = build.map("gt", [pivot, 0.0], shape, "bool", cast_to=rest.dtype)
    failed_before = build.map("ne", [info, 0], shape, "bool", cast_to="int32")
    unchanged = build.map("bitwise_or", [is_positive, failed_before], shape, "bool")
    number = build.expand(build.as_tensor(column + 1, "int32"), shape)
    return select(build, Operator.of("where", shape, "int32"), unchanged, info, number)


@lowers("linalg_solve_triangular", rows=row_rules.follow_matrices)
def solve_triangular(
    build: Builder, op: Operator, a: Any, b: Any, /, upper: bool, left: bool = True,
    unitriangular: bool = False,
) -> Tensor:  # fmt: skip
    """The solution x of a x = b, or of x a = b if `left` is false, where `a` is triangular. It is
    computed row by row, from the last one if `a` is an upper triangle. If `unitriangular`, the
    diagonal of `a` counts as ones."""
    a, b = build.as_tensor(a, op.dtype), build.as_tensor(b, op.dtype)
    size = _size_if_small(a)
    if not left:  # the transposed equation
        a, b, upper = _transpose(build, a), _transpose(build, b), not upper
    shape = (*op.shape[:-2], op.shape[-1 if left else -2])
    a = build.expand(a, (*shape[:-1], size, size))
    b = build.expand(b, (*shape[:-1], size, shape[-1]))
    solved: dict[int, Tensor] = {}
    for i in reversed(range(size)) if upper else range(size):
        rest: Tensor = _take_row(build, b, i)
        for j, row in solved.items():
            product = build.map("mul", [_take_element(build, a, shape, i, j), row], shape, op.dtype)
            rest = build.map("sub", [rest, product], shape, op.dtype)
        if not unitriangular:
            pivot = _take_element(build, a, shape, i, i)
            rest = build.map("div", [rest, pivot], shape, op.dtype)
        solved[i] = rest
    parts = [Part(row, _index_in_row(i)) for i, row in solved.items()]
    solution: Tensor = build.add(Assembly(build.values, b.shape, op.dtype, parts))
    return solution if left else _transpose(build, solution)


def _size_if_small(x: Tensor) -> int:
    """The number of rows of square matrices. Raises NotKnown if it exceeds _LARGEST."""
    size = x.shape[-1]
    if size > _LARGEST:
        raise NotKnown(f"a matrix of {size} rows, more than {_LARGEST}")
    return size


# Below, matrices have the shape (…, rows, columns), a column (…, rows), and a row (…, columns).


def _take_column(build: Builder, x: Tensor, j: int) -> Tensor:
    """A view of column j of each matrix."""
    return build.view(x, x.shape[:-1], lambda index: (*index, constant(j)))


def _take_row(build: Builder, x: Tensor, i: int) -> Tensor:
    """A view of row i of each matrix."""
    return build.view(x, (*x.shape[:-2], x.shape[-1]), _index_in_row(i))


def _take_rows_from(build: Builder, column: Tensor, begin: int) -> Tensor:
    """A view of a column from row `begin` on."""
    shape = (*column.shape[:-1], column.shape[-1] - begin)
    return build.view(column, shape, lambda index: (*index[:-1], index[-1] + begin))


def _take_first_row(build: Builder, column: Tensor) -> Tensor:
    """A view of the first element of a column, of shape (…, 1)."""
    return build.view(column, (*column.shape[:-1], 1), lambda index: (*index[:-1], constant(0)))


def _index_in_column(k: int) -> Callable[[Indices], Indices]:
    """A function from the index in column k, which begins at the diagonal, to the index in the
    matrix."""
    return lambda index: (*index[:-1], index[-1] + k, constant(k))


def _index_in_row(i: int) -> Callable[[Indices], Indices]:
    """A function from the index in row i to the index in the matrix."""
    return lambda index: (*index[:-1], constant(i), index[-1])


def _take_element(build: Builder, a: Tensor, shape: Sequence[int], i: int, j: int) -> Tensor:
    """A view of element (i, j) of each matrix, repeated for each column of a row of this shape."""
    return build.view(a, shape, lambda index: (*index[:-1], constant(i), constant(j)))


def _transpose(build: Builder, x: Tensor) -> Tensor:
    """A view of the transposed matrices."""
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    return transpose(build, Operator.of("transpose", shape, x.dtype), x, -2, -1)
