"""Values: what is computed for one element of one row, as an expression of reads and calls.

Equal expressions are one object, so that what is computed twice is seen by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines.lanes.index import Indices

if TYPE_CHECKING:
    from engines.lanes.tensors import Tensor

Number = int | float | bool
Bounds = tuple[int, int]

# The least and the largest of each integer type.
RANGES: dict[str, Bounds] = {
    "bool": (0, 1),
    **{f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32)},
}


LONG = ("float64", "int64", "uint32")
"""What takes 8 bytes a row where it is computed; all else takes 4."""


@dataclass(frozen=True, eq=False)
class Value:
    """`bounds` are those of an integer; None for a floating-point number."""

    dtype: str
    bounds: Bounds | None


@dataclass(frozen=True, eq=False)
class Literal(Value):
    number: Number


@dataclass(frozen=True, eq=False)
class Read(Value):
    """An element of a tensor that lies in memory."""

    tensor: Tensor
    index: Indices


@dataclass(frozen=True, eq=False)
class Call(Value):
    """A function of rows.h, or an operator, on values that have its types already."""

    function: str
    arguments: tuple[Value, ...]


class Values:
    """Makes values; equal ones once."""

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

    def call(
        self, function: str, *arguments: Value, dtype: str, bounds: Bounds | None = None
    ) -> Value:
        """`bounds` where they are known to be closer than the dtype's."""
        if dtype in RANGES:
            bounds = bounds or _bounds(function, arguments)
            low, high = RANGES[dtype]
            fits = bounds is not None and low <= bounds[0] and bounds[1] <= high
            bounds = bounds if fits else (low, high)
        made = Call(dtype, bounds, function, arguments)
        return self._made.setdefault(("call", function, arguments, dtype), made)


def _bounds(function: str, arguments: Sequence[Value]) -> Bounds | None:
    """Between which numbers a function's result lies, by those of its arguments."""
    known = [each.bounds for each in arguments if each.bounds is not None]
    if len(known) != 2 or function not in _BOUNDS:
        return None
    return _BOUNDS[function](*known)


def _product(a: Bounds, b: Bounds) -> Bounds:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


_BOUNDS: dict[str, Callable[[Bounds, Bounds], Bounds]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
}


def walk(value: Value, seen: set[Value] | None = None) -> Iterator[Value]:
    """A value and all in it, each once, arguments first."""
    seen = set() if seen is None else seen
    if value in seen:
        return
    seen.add(value)
    for inner in parts(value):
        yield from walk(inner, seen)
    yield value


def parts(value: Value) -> tuple[Value, ...]:
    """What a value is made of: a call's arguments, and what an index takes from the row."""
    if isinstance(value, Call):
        return value.arguments
    if isinstance(value, Read):
        atoms = (atom for each in value.index for atom in each.atoms())
        return tuple(a.value for a in atoms if hasattr(a, "value"))
    return ()
