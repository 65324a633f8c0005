"""Expressions of columns, as plain data: they compute a network's features from raw columns.

An expression begins with a column and applies one step after another. Nothing in a config is ever
evaluated as code. A config is read without torch, so this file does not import it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Operations on one tensor, each with the names of its number arguments.
UNARY: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "log": (lambda x: x.log(), ()),
    "log1p": (lambda x: x.log1p(), ()),
    "abs": (lambda x: x.abs(), ()),
    "sqrt": (lambda x: x.sqrt(), ()),
    "square": (lambda x: x.square(), ()),
    "clip": (lambda x, low, high: x.clamp(low, high), ("low", "high")),
    # The same formula as in weaver.
    "standardise": (lambda x, centre, scale: (x - centre) * scale, ("centre", "scale")),
    # 1 where x > threshold, else 0.
    "above": (lambda x, threshold: (x > threshold).to(x.dtype), ("threshold",)),
}
# Operations that take a second value.
BINARY: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "ratio": operator.truediv,
}


@dataclass(frozen=True)
class Operation:
    """A step of an expression: the operation `name` on the value so far. One of `UNARY` takes the
    `numbers`, one of `BINARY` takes the second value `operand`."""

    name: str
    numbers: tuple[float, ...] = ()
    operand: Expression | float | None = None


@dataclass(frozen=True)
class Expression:
    """An expression: the values of a column, to which the steps are applied one after the other."""

    column: str
    steps: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Features:
    """The features made from one block: K expressions of its columns.

    `columns` are the block's columns, in its order, with the shape of one row: () or the extents
    of Eigen columns, which must be equal. In rows where the column `exists` is not above zero,
    every feature is `pad`.
    """

    columns: tuple[tuple[str, tuple[int, ...]], ...]
    values: tuple[Expression, ...]
    exists: str | None = None
    pad: float = 0.0

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of a feature in one row: that of the Eigen columns, () if there are none."""
        return max((shape for _, shape in self.columns), key=len)
