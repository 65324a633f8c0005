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
    if all are). From that column on the factor is NaN."""
    size = _small(x)
    x = _turned(build, op, x) if upper else x  # only this triangle is read
    columns: list[Tensor] = []  # column k holds the rows from k on
    info = build.expand(build.tensor(0, "int32"), op.shape[:-2])
    for j in range(size):
        shape = (*op.shape[:-2], size - j)
        rest: Tensor = _rows_from(build, _column(build, x, j), j)
        for k, column in enumerate(columns):
            own = _rows_from(build, column, j - k)
            times = build.map("mul", [own, _first(build, own)], shape, op.dtype)
            rest = build.map("sub", [rest, times], shape, op.dtype)
        pivot = _first(build, rest)
        root = build.map("sqrt", [pivot], pivot.shape, op.dtype)
        columns.append(build.map("div", [rest, root], shape, op.dtype))
        info = _first_failure(build, info, rest, j)
    parts = [Part(column, _from_diagonal(k)) for k, column in enumerate(columns)]
    zeros = build.expand(build.tensor(0.0, op.dtype), op.shape)
    assembled = Assembly(build.values, op.shape, op.dtype, [Part(zeros, lambda at: at), *parts])
    lower: Tensor = build.add(assembled)
    return [_turned(build, op, lower) if upper else lower, info]


def _first_failure(build: Builder, info: Tensor, rest: Tensor, column: int) -> Tensor:
    """`info` of a factorisation, after a column: the number of the first column whose pivot is not
    positive."""
    shape, rank = info.shape, len(info.shape)
    pivot = build.view(rest, shape, lambda at: (*at[:rank], constant(0)))
    positive = build.map("gt", [pivot, 0.0], shape, "bool", of=rest.dtype)
    failed = build.map("ne", [info, 0], shape, "bool", of="int32")
    kept = build.map("bitwise_or", [positive, failed], shape, "bool")
    number = build.expand(build.tensor(column + 1, "int32"), shape)
    whole = Operator("where", (torch.empty(shape, dtype=torch.int32, device="meta"),))
    return select(build, whole, kept, info, number)


@lowers("linalg_solve_triangular", rows=row_rules.matrices)
def solve_triangular(
    build: Builder, op: Operator, a: Any, b: Any, /, upper: bool, left: bool = True,
    unitriangular: bool = False,
) -> Tensor:  # fmt: skip
    """The solution of a triangular system, row by row."""
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
        for j, known in solved.items():
            times = build.map("mul", [_number(build, a, shape, i, j), known], shape, op.dtype)
            rest = build.map("sub", [rest, times], shape, op.dtype)
        if not unitriangular:
            pivot = _number(build, a, shape, i, i)
            rest = build.map("div", [rest, pivot], shape, op.dtype)
        solved[i] = rest
    whole = (*shape[:-1], size, shape[-1])
    parts = [Part(row, _into_row(i)) for i, row in solved.items()]
    solution: Tensor = build.add(Assembly(build.values, whole, op.dtype, parts))
    return solution if left else _turned(build, op, solution)


def _small(x: Tensor) -> int:
    size = x.shape[-1]
    if size > _LARGEST:
        raise NotKnown(f"a matrix of {size} rows, more than {_LARGEST}")
    return size


def _column(build: Builder, x: Tensor, j: int) -> Tensor:
    return build.view(x, x.shape[:-1], lambda at: (*at, constant(j)))


def _row(build: Builder, x: Tensor, i: int) -> Tensor:
    return build.view(x, (*x.shape[:-2], x.shape[-1]), lambda at: (*at[:-1], constant(i), at[-1]))


def _rows_from(build: Builder, column: Tensor, begin: int) -> Tensor:
    shape = (*column.shape[:-1], column.shape[-1] - begin)
    return build.view(column, shape, lambda at: (*at[:-1], at[-1] + begin))


def _first(build: Builder, column: Tensor) -> Tensor:
    return build.view(column, (*column.shape[:-1], 1), lambda at: (*at[:-1], constant(0)))


def _from_diagonal(k: int) -> Callable[[Indices], Indices]:
    return lambda at: (*at[:-1], at[-1] + k, constant(k))


def _into_row(i: int) -> Callable[[Indices], Indices]:
    return lambda at: (*at[:-1], constant(i), at[-1])


def _number(build: Builder, a: Tensor, shape: Sequence[int], i: int, j: int) -> Tensor:
    return build.view(a, shape, lambda at: (*at[:-1], constant(i), constant(j)))


def _turned(build: Builder, op: Operator, x: Tensor) -> Tensor:
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    result = torch.empty(shape, dtype=op.results[0].dtype, device="meta")
    return transpose(build, Operator("transpose", (result,)), x, -2, -1)
