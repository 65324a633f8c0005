"""Values: expressions of reads and calls that compute one element of one row; the base of tensors.

Equal expressions are the same object, so that repeated ones are found by identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from engines.lanes.functions import FUNCTIONS, RANGES, Bounds
from engines.lanes.index import Index, Indices, OfRow, Variable, dot, variable

Number = int | float | bool
Shape = tuple[int, ...]
At: TypeAlias = "Callable[[Tensor, Indices], Value]"
"""Gives the value of a tensor's element."""


@dataclass(frozen=True, eq=False)
class Value:
    """The base class. `bounds`: the least and largest value of an integer; None for a float."""

    dtype: str
    bounds: Bounds | None


@dataclass(frozen=True, eq=False)
class Literal(Value):
    number: Number


@dataclass(frozen=True, eq=False)
class Read(Value):
    """An element of a tensor in memory, or of a product or reduction in a register."""

    tensor: Tensor
    index: Indices


@dataclass(frozen=True, eq=False)
class Open(Value):
    """An element that is known only when a loop variable is a constant."""

    variable: Variable


@dataclass(frozen=True, eq=False)
class Call(Value):
    """A function of headers/functions.h, or an operator. Its arguments already have its types."""

    function: str
    arguments: tuple[Value, ...]


class Values:
    """Creates values. Equal values are the same object."""

    def __init__(self) -> None:
        self._values: dict[tuple[Any, ...], Value] = {}

    def literal(self, number: Number, dtype: str) -> Value:
        """The value of a number; equal numbers of a dtype are one value."""
        if dtype in RANGES:
            number = int(number)
            literal = Literal(dtype, (number, number), number)
        else:
            number = float(number)
            literal = Literal(dtype, None, number)
        # repr: 0.0 and -0.0 are equal, and NaN is not equal to itself.
        return self._values.setdefault(("literal", repr(number), dtype), literal)

    def read(self, tensor: Tensor, index: Indices) -> Value:
        """A read of a tensor's element."""
        bounds = tensor.bounds if tensor.dtype in RANGES else None
        read = Read(tensor.dtype, bounds, tensor, index)
        return self._values.setdefault(("read", tensor, index), read)

    def open(self, variable: Variable, dtype: str) -> Value:
        """An element that is known only when `variable` is a constant."""
        value = Open(dtype, RANGES.get(dtype), variable)
        return self._values.setdefault(("open", variable, dtype), value)

    def call(
        self, function: str, *arguments: Value, dtype: str, bounds: Bounds | None = None
    ) -> Value:
        """A call. `bounds`: given if they are known to be narrower than those of the dtype. If they
        exceed those of the dtype, the result may wrap around, and nothing is known."""
        if dtype not in RANGES:
            bounds = None
        else:
            low, high = RANGES[dtype]
            bounds = bounds or _bounds(function, arguments)
            if bounds is None or bounds[0] < low or bounds[1] > high:
                bounds = low, high
        call = Call(dtype, bounds, function, arguments)
        return self._values.setdefault(("call", function, arguments, dtype), call)


def _bounds(function: str, arguments: tuple[Value, ...]) -> Bounds | None:
    """The bounds of a function's result, from the bounds of its arguments; None if not known."""
    of_arguments = [value.bounds for value in arguments if value.bounds is not None]
    bounds = FUNCTIONS[function].bounds if function in FUNCTIONS else None
    return bounds(*of_arguments) if bounds is not None and len(of_arguments) == 2 else None


def walk(value: Value) -> Iterator[Value]:
    """A value and all values in it, each once; arguments come before their call.

    Without recursion, since an expression may be deeper than Python's stack.
    """
    seen, path = {value}, [(value, iter(parts(value)))]  # each with its parts still to visit
    while path:
        last, rest = path[-1]
        new = next((part for part in rest if part not in seen), None)
        if new is None:
            path.pop()
            yield last
        else:
            seen.add(new)
            path.append((new, iter(parts(new))))


def parts(value: Value) -> tuple[Value, ...]:
    """The direct parts of a value: a call's arguments, or the values of rows in a read's index."""
    if isinstance(value, Call):
        return value.arguments
    if isinstance(value, Read):
        atoms = (atom for place in value.index for atom in place.atoms())
        return tuple(atom.value for atom in atoms if isinstance(atom, OfRow))
    return ()


class Tensor:
    """The base class. `sources`: the tensors from whose elements its elements are computed."""

    cost = 0
    """The approximate number of instructions that compute an element from stored tensors."""
    bounds: tuple[int, int] | None = None

    def __init__(self, values: Values, shape: Shape, dtype: str, *sources: Tensor) -> None:
        self.values, self.shape, self.dtype, self.sources = values, shape, dtype, sources
        self.bounds = RANGES.get(dtype)
        self.line = ""  # the line of the model, for a comment in the generated code
        self.operator = ""  # the operator of the model, for an error
        self.innermost: int | None = None  # the dimension along which memory is contiguous

    @property
    def count(self) -> int:
        """The number of elements, negative if the number of items is unknown."""
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the stored tensor, in elements."""
        outermost_first = sorted(range(len(self.shape)), key=lambda d: d == self.innermost)
        strides, stride = [0] * len(self.shape), 1
        for d in reversed(outermost_first):
            strides[d] = stride
            stride *= self.shape[d]
        return tuple(strides)

    def address(self, index: Indices) -> Index:
        """The position of an element in the tensor's memory, in elements."""
        return dot(index, self.strides)

    @property
    def root(self) -> Tensor:
        """The tensor of which this is a view; for all but views, the tensor itself."""
        return self

    def element(self, index: Indices, at: At) -> Value:
        """The expression that computes the element at an index, from the elements of `sources`."""
        raise NotImplementedError

    def variables(self, name: str = "i") -> Indices:
        """A loop variable for each dimension."""
        return tuple(variable(f"{name}{d}", size) for d, size in enumerate(self.shape))
