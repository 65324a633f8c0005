"""Expressions of columns, as plain data: how raw columns become what a network was trained on.

An expression begins with a column and takes one step after another. Nothing here is ever evaluated
as code; `stages.model.preprocess` has one torch operation for each name.
"""

from __future__ import annotations

from dataclasses import dataclass

# The operations that take numbers, with what these are, and those that take a second value.
NUMBERS: dict[str, tuple[str, ...]] = {
    "log": (),
    "log1p": (),
    "abs": (),
    "sqrt": (),
    "square": (),
    "clip": ("low", "high"),
    "standardise": ("centre", "scale"),  # (x - centre) * scale, as weaver has it
    "above": ("threshold",),  # 1 where x > threshold, else 0
}
OPERANDS = ("add", "subtract", "multiply", "ratio")


@dataclass(frozen=True)
class Step:
    """One operation on the value so far, with its numbers or its second value."""

    operation: str
    numbers: tuple[float, ...] = ()
    operand: Expression | float | None = None


@dataclass(frozen=True)
class Expression:
    column: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Features:
    """What is made of one block: K expressions of its columns.

    `columns` are the block's, in its order, with the shape of one row: () or the extents of Eigen
    columns, which all have the same. Where the column `exists` is not above zero, every feature is
    `pad`.
    """

    columns: tuple[tuple[str, tuple[int, ...]], ...]
    values: tuple[Expression, ...]
    exists: str | None = None
    pad: float = 0.0

    @property
    def extents(self) -> tuple[int, ...]:
        return max((shape for _, shape in self.columns), key=len)
