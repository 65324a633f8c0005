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
"""A function that gives the value of a tensor's element at an index."""


@dataclass(frozen=True, eq=False)
class Value:
    """The base class of all values.

    `bounds` are the least and the largest number that an integer value can be; None for a float.
    """

    dtype: str
    bounds: Bounds | None


@dataclass(frozen=True, eq=False)
class Literal(Value):
    """A number that is known when the program is compiled."""

    number: Number


@dataclass(frozen=True, eq=False)
class Read(Value):
    """Reads an element of a tensor, from memory, or from the register in which a product or a
    reduction has just computed it."""

    tensor: Tensor
    index: Indices


@dataclass(frozen=True, eq=False)
class Open(Value):
    """Stands for an element of a `Beside`: which tensor has the element depends on a loop variable.

    The plan unrolls the loop over `variable`, and builds the expression again with each constant.
    """

    variable: Variable


@dataclass(frozen=True, eq=False)
class Call(Value):
    """Calls a function of headers/functions.h, or applies an operator of C++. The arguments must
    have the dtypes that it takes: the code converts none of them."""

    function: str
    arguments: tuple[Value, ...]


class Values:
    """Creates values. Equal values are the same object."""

    def __init__(self) -> None:
        self._values: dict[tuple[Any, ...], Value] = {}

    def literal(self, number: Number, dtype: str) -> Value:
        """The value of a number that is known when the program is compiled."""
        if dtype in RANGES:
            number = int(number)
            literal = Literal(dtype, (number, number), number)
        else:
            number = float(number)
            literal = Literal(dtype, None, number)
        # repr: 0.0 and -0.0 are equal, and NaN is not equal to itself.
        return self._values.setdefault(("literal", repr(number), dtype), literal)

    def read(self, tensor: Tensor, index: Indices) -> Value:
        """The value that reads a tensor's element."""
        bounds = tensor.bounds if tensor.dtype in RANGES else None
        read = Read(tensor.dtype, bounds, tensor, index)
        return self._values.setdefault(("read", tensor, index), read)

    def open(self, variable: Variable, dtype: str) -> Value:
        """The value that stands for an element until `variable` is a constant: see `Open`."""
        value = Open(dtype, RANGES.get(dtype), variable)
        return self._values.setdefault(("open", variable, dtype), value)

    def call(
        self, function: str, *arguments: Value, dtype: str, bounds: Bounds | None = None
    ) -> Value:
        """The value that calls a function, and whose result has this dtype.

        `bounds` are given if the caller knows more than follows from the arguments. An integer that
        may exceed the bounds of its dtype wraps around, and can then be any number of the dtype.
        """
        if dtype not in RANGES:
            bounds = None
        else:
            low, high = RANGES[dtype]
            bounds = bounds or _result_bounds(function, arguments)
            if bounds is None or bounds[0] < low or bounds[1] > high:
                bounds = low, high
        call = Call(dtype, bounds, function, arguments)
        return self._values.setdefault(("call", function, arguments, dtype), call)


def _result_bounds(function: str, arguments: tuple[Value, ...]) -> Bounds | None:
    """The bounds of a function's result, computed from those of its two arguments. None if the
    function has no rule for its bounds, or if an argument has no bounds."""
    known_bounds = [value.bounds for value in arguments if value.bounds is not None]
    bounds_of = FUNCTIONS[function].bounds if function in FUNCTIONS else None
    return bounds_of(*known_bounds) if bounds_of is not None and len(known_bounds) == 2 else None


def walk(value: Value) -> Iterator[Value]:
    """Yields a value and all values inside it, each once. Arguments come before their call.

    It does not recurse, since an expression may be deeper than Python's stack.
    """
    seen, path = {value}, [(value, iter(parts(value)))]  # each with its parts still to visit
    while path:
        innermost, unvisited = path[-1]
        part = next((part for part in unvisited if part not in seen), None)
        if part is None:
            path.pop()
            yield innermost
        else:
            seen.add(part)
            path.append((part, iter(parts(part))))


def parts(value: Value) -> tuple[Value, ...]:
    """The values directly inside a value: the arguments of a call, or those values in the index of
    a read that differ between rows (`OfRow`)."""
    if isinstance(value, Call):
        return value.arguments
    if isinstance(value, Read):
        atoms = (atom for position in value.index for atom in position.atoms())
        return tuple(atom.value for atom in atoms if isinstance(atom, OfRow))
    return ()


class Tensor:
    """The base class of all tensors. `sources` are the tensors from whose elements the elements of
    this one are computed."""

    cost = 0
    """The approximate number of instructions that compute an element from stored tensors."""
    bounds: Bounds | None = None
    """The least and the largest element, if the dtype is one of integers."""

    def __init__(self, values: Values, shape: Shape, dtype: str, *sources: Tensor) -> None:
        self.values, self.shape, self.dtype, self.sources = values, shape, dtype, sources
        self.bounds = RANGES.get(dtype)
        self.line = ""  # the line of the model, for a comment in the generated code
        self.operator = ""  # the operator of the model, for an error
        self.innermost: int | None = None  # the dimension along which memory is contiguous

    @property
    def count(self) -> int:
        """The number of elements. It is negative if the first size is UNKNOWN, which is -1."""
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the stored tensor, in elements. It is dense; the dimension `innermost`, or
        else the last one, has stride 1."""
        # The sort is stable: it only moves `innermost` to the end.
        outermost_first = sorted(range(len(self.shape)), key=lambda d: d == self.innermost)
        strides, stride = [0] * len(self.shape), 1
        for d in reversed(outermost_first):
            strides[d] = stride
            stride *= self.shape[d]
        return tuple(strides)

    def address(self, index: Indices) -> Index:
        """The position of an element in the tensor's memory, counted in elements."""
        return dot(index, self.strides)

    @property
    def root(self) -> Tensor:
        """The tensor of which this is a view; for all but views, the tensor itself."""
        return self

    def element(self, index: Indices, at: At) -> Value:
        """The expression that computes the element at an index. `at` gives the elements of the
        `sources`, which may be reads or expressions themselves."""
        raise NotImplementedError

    def variables(self, name: str = "i") -> Indices:
        """A loop variable for each dimension, with the names `i0`, `i1`, ..."""
        return tuple(variable(f"{name}{d}", size) for d, size in enumerate(self.shape))
