"""Values: expressions of reads and calls that compute one element of one row.

Equal expressions are the same object, so that repeated ones are found by identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines.lanes.functions import FUNCTIONS, RANGES, Bounds
from engines.lanes.index import Indices, Variable

if TYPE_CHECKING:
    from engines.lanes.tensors import Tensor

Number = int | float | bool


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
    """Makes values. Equal values are the same object."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Value] = {}

    def literal(self, number: Number, dtype: str) -> Value:
        if dtype in RANGES:
            number = int(number)
            made = Literal(dtype, (number, number), number)
        else:
            number = float(number)
            made = Literal(dtype, None, number)
        # repr: 0.0 and -0.0 are equal, and NaN is not equal to itself.
        return self._made.setdefault(("literal", repr(number), dtype), made)

    def read(self, tensor: Tensor, index: Indices) -> Value:
        bounds = tensor.bounds if tensor.dtype in RANGES else None
        made = Read(tensor.dtype, bounds, tensor, index)
        return self._made.setdefault(("read", tensor, index), made)

    def open(self, variable: Variable, dtype: str) -> Value:
        made = Open(dtype, RANGES.get(dtype), variable)
        return self._made.setdefault(("open", variable, dtype), made)

    def call(
        self, function: str, *arguments: Value, dtype: str, bounds: Bounds | None = None
    ) -> Value:
        """A call. `bounds`: given if they are known to be narrower than those of the dtype."""
        known: Bounds | None = None  # of a float nothing is known
        if dtype in RANGES:
            bounds = bounds or _bounds(function, arguments)
            low, high = RANGES[dtype]
            fits = bounds is not None and low <= bounds[0] and bounds[1] <= high
            known = bounds if fits else (low, high)
        made = Call(dtype, known, function, arguments)
        return self._made.setdefault(("call", function, arguments, dtype), made)


def _bounds(function: str, arguments: tuple[Value, ...]) -> Bounds | None:
    """The bounds of a function's result, from the bounds of its arguments; None if not known."""
    known = [each.bounds for each in arguments if each.bounds is not None]
    bounds = FUNCTIONS[function].bounds if function in FUNCTIONS else None
    return bounds(*known) if bounds is not None and len(known) == 2 else None


def walk(value: Value) -> Iterator[Value]:
    """A value and all values in it, each once; arguments come before their call."""
    seen, waiting = {value}, [(value, iter(parts(value)))]
    while waiting:
        each, rest = waiting[-1]
        inner = next((part for part in rest if part not in seen), None)
        if inner is None:
            waiting.pop()
            yield each
        else:
            seen.add(inner)
            waiting.append((inner, iter(parts(inner))))


def parts(value: Value) -> tuple[Value, ...]:
    """The direct parts of a value: a call's arguments, or the values of rows in a read's index."""
    if isinstance(value, Call):
        return value.arguments
    if isinstance(value, Read):
        atoms = (atom for each in value.index for atom in each.atoms())
        return tuple(a.value for a in atoms if hasattr(a, "value"))
    return ()
