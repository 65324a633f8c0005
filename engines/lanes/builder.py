"""What operators are made of: tensors from numbers and weights, casts, maps, views, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from engines.lanes.index import Indices, Variable, constant
from engines.lanes.tensors import (
    Argument,
    Constant,
    Map,
    Program,
    Shape,
    Tensor,
    Uniform,
    View,
)
from engines.lanes.values import RANGES, Literal, Value, Values

HALF = ("float16", "bfloat16")
_FULL_WIDTH = ("bool", "int32", "int64")  # arithmetic in rows.h is of 32 and 64 bits


T = TypeVar("T", bound=Tensor)


class NotKnown(Exception):
    """An operator, or a use of one, that there is no code for. Its text goes into an error."""


class Builder:
    """Adds tensors to a program. `line` is the model's line that they come from."""

    def __init__(self) -> None:
        self.values = Values()
        self.program = Program(self.values)
        self.line = ""
        self.counts: dict[Any, int] = {}
        """The symbols of how many items each jagged collection has, and its number."""

    def count_of(self, size: Any) -> Value | None:
        """How many items a collection has, by torch's symbol for it; a number as it is."""
        if isinstance(size, int):
            return self.values.literal(size, "int64")
        number = self.counts.get(size.node.expr)
        if number is None:
            return None
        place = self.values.literal(number, "int64")
        return self.values.call("items", place, dtype="int64", bounds=(0, 1 << 40))

    def add(self, tensor: T) -> T:
        tensor.line = self.line
        self.program.tensors.append(tensor)
        return tensor

    def tensor(self, given: Any, dtype: str | None = None) -> Tensor:
        """A tensor of weights, a number, or a tensor as it is; cast where a dtype is asked for."""
        if isinstance(given, Tensor):
            made: Tensor = given
        elif isinstance(given, torch.Tensor):
            data = given if dtype is None else given.to(getattr(torch, dtype))
            made = self.add(Constant(self.values, data))
        elif isinstance(given, Value):
            made = self.add(Uniform(self.values, (), given))
        else:
            dtype = dtype or dtype_of(given)
            made = self.add(Uniform(self.values, (), self.values.literal(given, dtype)))
        return made if dtype is None else self.cast(made, dtype)

    def cast(self, given: Tensor, dtype: str) -> Tensor:
        if given.dtype == dtype:
            return given
        made = Map(self.values, dtype, lambda x: self.cast_value(x, dtype), [given], 1)
        if made.bounds is not None and given.bounds is not None:
            (low, high), (least, most) = made.bounds, given.bounds
            made.bounds = given.bounds if low <= least and most <= high else made.bounds
        return self.add(made)

    def cast_value(self, value: Value, dtype: str) -> Value:
        """As torch converts: towards zero to an integer, to the nearest floating-point number."""
        if value.dtype == dtype:
            return value
        if isinstance(value, Literal):
            converted = torch.tensor(value.number).to(getattr(torch, dtype)).item()
            return self.values.literal(converted, dtype)
        return self.values.call(f"to_{dtype}", value, dtype=dtype, bounds=value.bounds)

    def map(
        self,
        function: str,
        arguments: Sequence[Any],
        shape: Shape,
        dtype: str,
        cost: int = 1,
        of: str | None = None,
    ) -> Tensor:
        """`function` of rows.h, of arguments that are cast to `of` (else the result's dtype)."""
        given = [self.expand(self.tensor(a, of or dtype), shape) for a in arguments]

        def call(*values: Value) -> Value:
            return self.rounded(self.values.call(function, *values, dtype=dtype))

        return self.add(Map(self.values, dtype, call, given, cost))

    def rounded(self, value: Value) -> Value:
        """To the precision of its own dtype, where rows.h reckons in a wider one."""
        narrow = value.dtype in HALF or (value.dtype in RANGES and value.dtype not in _FULL_WIDTH)
        if not narrow:
            return value
        return self.values.call(f"rounded_{value.dtype}", value, dtype=value.dtype)

    def view(self, base: Tensor, shape: Sequence[int], where: Callable[[Indices], Indices]) -> View:
        return self.add(View(base, tuple(shape), where))

    def expand(self, given: Tensor, shape: Shape) -> Tensor:
        """By torch's rules of broadcasting."""
        if given.shape == tuple(shape):
            return given
        lacking = len(shape) - len(given.shape)
        same = [own == wide for own, wide in zip(given.shape, shape[lacking:], strict=True)]

        def where(index: Indices) -> Indices:
            own = index[lacking:]
            return tuple(i if kept else constant(0) for i, kept in zip(own, same, strict=True))

        return self.view(given, shape, where)

    def copy(self, given: Tensor) -> Tensor:
        """In memory of its own."""
        made = self.add(Map(self.values, given.dtype, lambda x: x, [given], 0))
        made.bounds = given.bounds
        made.must_be_stored = True
        return made

    def in_memory(self, given: Tensor) -> Tensor:
        """The tensor such that an element's address grows evenly with each index."""
        base: Tensor = given
        index = given.variables()
        while isinstance(base, View):
            index = base.where(index)
            base = base.base
        if isinstance(base, Argument | Constant | Uniform) or not is_even(index):
            return self.copy(given)
        base.must_be_stored = True
        return given


def is_even(index: Indices) -> bool:
    """Whether there are only variables in it."""
    return all(isinstance(atom, Variable) for each in index for atom, _ in each.terms)


def dtype_of(number: Any) -> str:
    """What torch takes a number for, where it stands alone."""
    return {bool: "bool", int: "int64"}.get(type(number), "float32")
