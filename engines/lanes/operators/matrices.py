"""Factors of small matrices, and systems of equations with a triangular matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engines.exported import row_rules
from engines.lanes.index import Indices, constant
from engines.lanes.operators.pointwise import select
from engines.lanes.operators.registry import Operator, lowers
from engines.lanes.operators.views import transpose
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import Assembly, Part
from engines.lanes.values import Tensor

_LARGEST = 16  # rows of a matrix: the code has a step for each pair of columns


@lowers("linalg_cholesky_ex", rows=row_rules.matrices)
def cholesky(build: Builder, op: Operator, x: Tensor, /, upper: bool = False) -> list[Tensor]:
    """The factor of each matrix, and the number of the first column whose pivot is not positive (0
    if all are). From that column on the factor is NaN.

    Column j of the factor L is what is left of that of the matrix without the products of the
    columns before, L[j:, k] * L[j, k], divided by the square root of its first element.
    """
    size = _small(x)
    x = _turned(build, op, x) if upper else x  # only this triangle is read
    columns: list[Tensor] = []  # column k holds the rows from k on
    info = build.expand(build.tensor(0, "int32"), op.shape[:-2])
    for j in range(size):
        shape = (*op.shape[:-2], size - j)
        rest: Tensor = _rows_from(build, _column(build, x, j), j)
        for k, column in enumerate(columns):
            lower_rows = _rows_from(build, column, j - k)
            factor = _first_row(build, lower_rows)
            product = build.map("mul", [lower_rows, factor], shape, op.dtype)
            rest = build.map("sub", [rest, product], shape, op.dtype)
        pivot = _first_row(build, rest)
        root = build.map("sqrt", [pivot], pivot.shape, op.dtype)
        columns.append(build.map("div", [rest, root], shape, op.dtype))
        info = _first_failure(build, info, rest, j)
    parts = [Part(column, _from_diagonal(k)) for k, column in enumerate(columns)]
    zeros = build.expand(build.tensor(0.0, op.dtype), op.shape)
    assembled = Assembly(build.values, op.shape, op.dtype, [Part(zeros, lambda at: at), *parts])
    lower: Tensor = build.add(assembled)
    return [_turned(build, op, lower) if upper else lower, info]


def _first_failure(build: Builder, info: Tensor, rest: Tensor, column: int) -> Tensor:
    """`info` of a factorisation, after a column of which `rest` is left: the number, from 1 on, of
    the first column whose pivot is not positive; 0 if there is none so far."""
    shape, rank = info.shape, len(info.shape)
    pivot = build.view(rest, shape, lambda at: (*at[:rank], constant(0)))
    positive = build.map("gt", [pivot, 0.0], shape, "bool", of=rest.dtype)
    failed = build.map("ne", [info, 0], shape, "bool", of="int32")
    unchanged = build.map("bitwise_or", [positive, failed], shape, "bool")
    number = build.expand(build.tensor(column + 1, "int32"), shape)
    of_integers = Operator("where", (torch.empty(shape, dtype=torch.int32, device="meta"),))
    return select(build, of_integers, unchanged, info, number)


@lowers("linalg_solve_triangular", rows=row_rules.matrices)
def solve_triangular(
    build: Builder, op: Operator, a: Any, b: Any, /, upper: bool, left: bool = True,
    unitriangular: bool = False,
) -> Tensor:  # fmt: skip
    """The solution x of a x = b with a triangular `a`, or of x a = b if not `left`: row by row, the
    last first if `a` is an upper triangle."""
    a, b = build.tensor(a, op.dtype), build.tensor(b, op.dtype)
    size = _small(a)
    if not left:  # the transposed equation
        a, b, upper = _turned(build, op, a), _turned(build, op, b), not upper
    shape = (*op.shape[:-2], op.shape[-1 if left else -2])
    a = build.expand(a, (*shape[:-1], size, size))
    b = build.expand(b, (*shape[:-1], size, shape[-1]))
    solved: dict[int, Tensor] = {}
    for i in reversed(range(size)) if upper else range(size):
        rest: Tensor = _row(build, b, i)
        for j, row in solved.items():
            product = build.map("mul", [_element(build, a, shape, i, j), row], shape, op.dtype)
            rest = build.map("sub", [rest, product], shape, op.dtype)
        if not unitriangular:
            pivot = _element(build, a, shape, i, i)
            rest = build.map("div", [rest, pivot], shape, op.dtype)
        solved[i] = rest
    whole = (*shape[:-1], size, shape[-1])
    parts = [Part(row, _into_row(i)) for i, row in solved.items()]
    solution: Tensor = build.add(Assembly(build.values, whole, op.dtype, parts))
    return solution if left else _turned(build, op, solution)


def _small(x: Tensor) -> int:
    """The number of rows of square matrices; NotKnown if they are large."""
    size = x.shape[-1]
    if size > _LARGEST:
        raise NotKnown(f"a matrix of {size} rows, more than {_LARGEST}")
    return size


# Of matrices (…, rows, columns). A column is (…, rows), a row (…, columns).


def _column(build: Builder, x: Tensor, j: int) -> Tensor:
    """Column j of each matrix."""
    return build.view(x, x.shape[:-1], lambda at: (*at, constant(j)))


def _row(build: Builder, x: Tensor, i: int) -> Tensor:
    """Row i of each matrix."""
    return build.view(x, (*x.shape[:-2], x.shape[-1]), lambda at: (*at[:-1], constant(i), at[-1]))


def _rows_from(build: Builder, column: Tensor, begin: int) -> Tensor:
    """The rows of a column from `begin` on."""
    shape = (*column.shape[:-1], column.shape[-1] - begin)
    return build.view(column, shape, lambda at: (*at[:-1], at[-1] + begin))


def _first_row(build: Builder, column: Tensor) -> Tensor:
    """The first row of a column, (…, 1)."""
    return build.view(column, (*column.shape[:-1], 1), lambda at: (*at[:-1], constant(0)))


def _from_diagonal(k: int) -> Callable[[Indices], Indices]:
    """The places of column k, which begins at the diagonal, in a matrix."""
    return lambda at: (*at[:-1], at[-1] + k, constant(k))


def _into_row(i: int) -> Callable[[Indices], Indices]:
    """The places of row i in a matrix."""
    return lambda at: (*at[:-1], constant(i), at[-1])


def _element(build: Builder, a: Tensor, shape: Sequence[int], i: int, j: int) -> Tensor:
    """The element (i, j), for each column of a row of this shape."""
    return build.view(a, shape, lambda at: (*at[:-1], constant(i), constant(j)))


def _turned(build: Builder, op: Operator, x: Tensor) -> Tensor:
    """The transposed matrices."""
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    result = torch.empty(shape, dtype=op.results[0].dtype, device="meta")
    return transpose(build, Operator("transpose", (result,)), x, -2, -1)
