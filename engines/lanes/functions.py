"""The functions of numbers: for each its cost, its C++ text, its types and its bounds.

headers/functions.h and headers/lanes.h (on a GPU scalars.h) define them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Bounds = tuple[int, int]
BoundsOf = Callable[[Bounds, Bounds], Bounds]

# The least and the largest value of each integer type.
RANGES: dict[str, Bounds] = {
    "bool": (0, 1),
    **{f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32)},
}
FLOATS = ("float16", "bfloat16", "float32", "float64")
LONG = ("float64", "int64", "uint32")
"""The dtypes that take 8 bytes for each row during computation; all others take 4."""


def carrier(dtype: str) -> str:
    """The C++ vector type in which numbers of a dtype are computed: F for float32 and smaller
    floats, D for float64, I for int32 and smaller integers, Q for int64 and uint32."""
    if dtype in RANGES:
        return "Q" if dtype in LONG else "I"
    return "D" if dtype in LONG else "F"


@dataclass(frozen=True)
class Function:
    """A function of numbers that have the same type.

    cost: roughly the time relative to an addition.
    arguments: their number.
    carriers: the C++ types of the arguments for which the headers have the function.
    result: the dtype of the result; empty if it is that of the arguments.
    text: C++ with {} for each argument; empty if it is a call of the function.
    of_bools: `text` for bools, which are -1 (true) and 0; empty if it is the same.
    bounds: the bounds of an integer result, from those of two arguments.
    """

    cost: int
    arguments: int = 1
    carriers: str = "FDIQ"
    result: str = ""
    text: str = ""
    of_bools: str = ""
    bounds: BoundsOf | None = None


def _bounds_of_product(a: Bounds, b: Bounds) -> Bounds:
    """The bounds of x * y: a product is least and largest at ends of both factors."""
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _functions(arguments: int, carriers: str, **costs: int) -> dict[str, Function]:
    """A table of functions that all take `arguments` numbers; `costs` names each with its cost."""
    return {name: Function(cost, arguments, carriers) for name, cost in costs.items()}


def _comparison(of_bools: str = "") -> Function:
    """A comparison of two numbers, whose result is a bool. `of_bools`: see `Function`."""
    return Function(cost=1, arguments=2, result="bool", of_bools=of_bools)


def _operator(
    cost: int, text: str, carriers: str, of_bools: str = "", bounds: BoundsOf | None = None
) -> Function:
    """A function that is an operator of C++, with as many arguments as `text` has {}."""
    return Function(cost, text.count("{}"), carriers, text=text, of_bools=of_bools, bounds=bounds)


ATEN: dict[str, Function] = {
    **_functions(1, "FDIQ", abs=1, sign=2, relu=1),
    **_functions(1, "FD", exp=9, exp2=10, expm1=12, log=12, log2=30, log10=30, log1p=16, sqrt=5),
    **_functions(1, "FD", sigmoid=14, tanh=14, sinh=40, cosh=40, asinh=60, acosh=60, atanh=60),
    **_functions(1, "FD", sin=40, cos=40, tan=50, asin=50, acos=50, atan=50, erf=20, erfc=60),
    **_functions(1, "FD", floor=1, ceil=1, round=1, trunc=1),
    **_functions(2, "FD", atan2=50, copysign=2, hypot=10),
    **_functions(2, "FDIQ", fmod=40, remainder=40),
    **_functions(2, "IQ", bitwise_left_shift=2, bitwise_right_shift=2),
    "fmax": Function(3, 2, of_bools="{} | {}"),
    "fmin": Function(3, 2, of_bools="{} & {}"),
    "maximum": Function(
        2, 2, of_bools="{} | {}", bounds=lambda a, b: (max(a[0], b[0]), max(a[1], b[1]))
    ),
    "minimum": Function(
        2, 2, of_bools="{} & {}", bounds=lambda a, b: (min(a[0], b[0]), min(a[1], b[1]))
    ),
    "neg": _operator(1, "-{}", "FDIQ"),
    "mul": _operator(1, "{} * {}", "FDIQ", "{} & {}", _bounds_of_product),
    "bitwise_not": _operator(1, "~{}", "IQ"),
    "bitwise_and": _operator(1, "{} & {}", "IQ"),
    "bitwise_or": _operator(1, "{} | {}", "IQ"),
    "bitwise_xor": _operator(1, "{} ^ {}", "IQ"),
    "eq": _comparison(),
    "ne": _comparison(),
    "lt": _comparison("~{} & {}"),
    "le": _comparison("~{} | {}"),
    "gt": _comparison("{} & ~{}"),
    "ge": _comparison("{} | ~{}"),
    "isnan": Function(1, result="bool"),
    "isinf": Function(1, result="bool"),
}
"""The functions that are operators of ATen with the same name and the same arguments."""

FUNCTIONS: dict[str, Function] = {
    **ATEN,
    **_functions(1, "FDIQ", square=1, cube=2),
    **_functions(2, "FDIQ", div_trunc=8, div_floor=8),
    **_functions(2, "FDIQ", pow=60),
    **_functions(3, "FD", fma=1),
    **_functions(3, "IQ", clamp=2),
    "same": _operator(0, "{}", "FDIQ"),
    "add": _operator(1, "{} + {}", "FDIQ", "{} | {}", lambda a, b: (a[0] + b[0], a[1] + b[1])),
    "sub": _operator(1, "{} - {}", "FDIQ", bounds=lambda a, b: (a[0] - b[1], a[1] - b[0])),
    "div": _operator(4, "{} / {}", "FD"),
    **{f"to_{dtype}": Function(1, result=dtype) for dtype in (*RANGES, *FLOATS)},
    **{
        f"rounded_{dtype}": Function(1, 1, carrier(dtype))
        for dtype in ("int8", "uint8", "int16", "uint16", "uint32", "float16", "bfloat16")
    },
}
"""All functions of numbers. `select`, whose condition is a bool, and `items`, the number of items
of a jagged collection, are the calls that are not here."""


def call_text(name: str, arguments: Sequence[str], of_bools: bool = False) -> str:
    """The C++ text that computes a function's result from the texts of its arguments, such as
    ("mul", ["a + b", "c"]) -> "(a + b) * c". `of_bools`: the arguments are bools."""
    function = FUNCTIONS.get(name, Function(cost=0))  # `select` and `items` have no text
    operator = function.of_bools if of_bools and function.of_bools else function.text
    if not operator:
        return f"{name}({', '.join(arguments)})"
    return operator.format(*map(in_brackets, arguments))


def in_brackets(text: str) -> str:
    """The C++ text of an expression, in brackets if an operator is outside of brackets in it. A
    name or a call, such as `f(a + b)`, stays as it is."""
    depth = 0
    for letter in text:
        if letter in "([":
            depth += 1
        elif letter in ")]":
            depth -= 1
        elif depth == 0 and letter in " -~&|^":
            return f"({text})"
    return text
