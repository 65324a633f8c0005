"""Building blocks of operators: tensors from numbers and weights, casts, maps, views, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from engines.lanes.functions import FUNCTIONS, RANGES, carrier
from engines.lanes.index import Indices, constant, is_linear
from engines.lanes.tensors import Argument, Constant, Map, Program, Uniform, View
from engines.lanes.values import Call, Literal, Shape, Tensor, Value, Values

HALF = ("float16", "bfloat16")
_FULL_WIDTH = ("bool", "int32", "int64")  # the arithmetic in functions.h has 32 or 64 bits


T = TypeVar("T", bound=Tensor)


class NotKnown(Exception):
    """There is no code for an operator, or for its arguments. The text is used in an error."""


class Builder:
    """Adds tensors to a program. `line`, `operator`: those of the model from which they come."""

    def __init__(self) -> None:
        self.values = Values()
        self.program = Program(self.values)
        self.line, self.operator = "", ""
        self.counts: dict[Any, int] = {}
        """For each jagged collection: the symbol of its number of items, and its index."""

    def count_of(self, size: Any) -> Value | None:
        """The number of items of a collection, given by torch's symbol, or a known number. None if
        no collection has this symbol."""
        if isinstance(size, int):
            return self.values.literal(size, "int64")
        number = self.counts.get(size.node.expr)
        if number is None:
            return None
        place = self.values.literal(number, "int64")
        return self.values.call("items", place, dtype="int64", bounds=(0, 1 << 40))

    def add(self, tensor: T) -> T:
        tensor.line, tensor.operator = self.line, self.operator
        self.program.tensors.append(tensor)
        return tensor

    def tensor(self, given: Any, dtype: str | None = None) -> Tensor:
        """`given` as a Tensor: weights, a number, a Value or a Tensor. Cast to `dtype` if given."""
        if isinstance(given, Tensor):
            made: Tensor = given
        elif isinstance(given, torch.Tensor):
            data = given if dtype is None else given.to(getattr(torch, dtype))
            made = self.add(Constant(self.values, data))
        elif isinstance(given, Value):
            made = self.add(Uniform(self.values, (), given))
        else:
            dtype = dtype or dtype_of(given)
            if dtype in HALF:
                given = torch.tensor(given).to(getattr(torch, dtype)).item()
            made = self.add(Uniform(self.values, (), self.values.literal(given, dtype)))
        return made if dtype is None else self.cast(made, dtype)

    def cast(self, given: Tensor, dtype: str) -> Tensor:
        if given.dtype == dtype:
            return given
        converted = Map(self.values, dtype, lambda x: self.cast_value(x, dtype), [given], 1)
        if converted.bounds is not None and given.bounds is not None:
            (low, high), (least, most) = converted.bounds, given.bounds
            converted.bounds = given.bounds if low <= least and most <= high else converted.bounds
        return self.add(converted)

    def cast_value(self, value: Value, dtype: str) -> Value:
        """Converts as torch does: to integers towards zero, else to the nearest number."""
        if value.dtype == dtype:
            return value
        if isinstance(value, Call) and value.function == "to_float32":
            (narrow,) = value.arguments  # float32 holds each number of 16 bits
            if narrow.dtype == dtype in HALF:
                return narrow
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
        of: str | None = None,
    ) -> Tensor:
        """Apply one of `FUNCTIONS` to arguments that are cast to `of` (default: `dtype`)."""
        known = FUNCTIONS[function]
        if carrier(of or dtype) not in known.carriers:
            raise NotKnown(f"{function} of {of or dtype}")
        given = [self.expand(self.tensor(a, of or dtype), shape) for a in arguments]

        def call(*values: Value) -> Value:
            return self.rounded(self.values.call(function, *values, dtype=dtype))

        return self.add(Map(self.values, dtype, call, given, known.cost))

    def total(self, made: Tensor) -> Tensor:
        """Sums or products, rounded to their dtype."""
        return self.map("same", [made], made.shape, made.dtype) if _narrow(made.dtype) else made

    def rounded(self, value: Value) -> Value:
        """The value rounded to its dtype, if functions.h computes in a wider type."""
        if not _narrow(value.dtype):
            return value
        return self.values.call(f"rounded_{value.dtype}", value, dtype=value.dtype)

    def view(self, base: Tensor, shape: Sequence[int], where: Callable[[Indices], Indices]) -> View:
        return self.add(View(base, tuple(shape), where))

    def expand(self, given: Tensor, shape: Shape) -> Tensor:
        """A view with the given shape, by torch's rules of broadcasting."""
        if given.shape == tuple(shape):
            return given
        if isinstance(given.root, Argument):
            given = self.copy(given)  # which is stored if it is converted and read often
        lacking = len(shape) - len(given.shape)
        same = [own == wide for own, wide in zip(given.shape, shape[lacking:], strict=True)]

        def where(index: Indices) -> Indices:
            own = index[lacking:]
            return tuple(i if kept else constant(0) for i, kept in zip(own, same, strict=True))

        return self.view(given, shape, where)

    def copy(self, given: Tensor) -> Tensor:
        """A copy in separate memory."""
        copied = self.add(Map(self.values, given.dtype, lambda x: x, [given], 0))
        copied.bounds = given.bounds
        return copied

    def in_memory(self, given: Tensor) -> Tensor:
        """The tensor or a copy, for a reader that needs it in memory (see `plan.in_memory`) so that
        an element's address is linear in each index."""
        base: Tensor = given
        index = given.variables()
        while isinstance(base, View):
            index = base.where(index)
            base = base.base
        if isinstance(base, Argument | Constant | Uniform) or not is_linear(index):
            return self.copy(given)
        return given


def _narrow(dtype: str) -> bool:
    """True if functions.h computes in a wider type."""
    return dtype in HALF or (dtype in RANGES and dtype not in _FULL_WIDTH)


def dtype_of(number: Any) -> str:
    """The dtype that torch gives to a Python number."""
    return {bool: "bool", int: "int64"}.get(type(number), "float32")
