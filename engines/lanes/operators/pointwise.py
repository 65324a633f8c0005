"""Operators whose result has one element for each element of their arguments."""

from __future__ import annotations

from typing import Any

import torch

from engines.exported import row_rules
from engines.lanes.functions import ATEN, RANGES
from engines.lanes.operators.registry import Operator, lowers
from engines.lanes.tensor_builder import Builder
from engines.lanes.tensors import Map
from engines.lanes.values import Tensor, Value

_UNARY = [name for name, entry in ATEN.items() if entry.arguments == 1 and name != "round"]
_BINARY = [name for name, entry in ATEN.items() if entry.arguments == 2]
_SHIFTS = {"__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift"}
_LOGICAL = {"logical_and": "bitwise_and", "logical_or": "bitwise_or", "logical_xor": "bitwise_xor"}
# Exponents for which a power needs no logarithm, and the function that computes it.
_POWERS = {0.5: "sqrt", 1.0: "same", 2.0: "square", 3.0: "cube"}


@lowers(*_UNARY)
def unary_function(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    """An operator of one argument for which functions.py has a function of the same name. A
    function whose result always has one dtype, such as `isnan`, takes `x` as it is."""
    if op.name in ("floor", "ceil", "trunc") and op.dtype in RANGES:
        return x
    cast_to = x.dtype if ATEN[op.name].result else op.dtype
    return build.map(op.name, [x], op.shape, op.dtype, cast_to)


@lowers("round")
def round_to(build: Builder, op: Operator, x: Tensor, /, decimals: int = 0) -> Tensor:
    """Rounds to `decimals` places behind the point, or before it if negative. As in eager torch,
    the number is scaled by a power of 10, rounded to an integer, and scaled back."""
    if op.dtype in RANGES:
        return x
    if not decimals:
        return build.map("round", [x], op.shape, op.dtype)
    power = 10.0 ** abs(decimals)
    scale, unscale = ("mul", "div") if decimals > 0 else ("div", "mul")
    scaled = build.map(scale, [x, power], op.shape, op.dtype)
    whole = build.map("round", [scaled], op.shape, op.dtype)
    return build.map(unscale, [whole, power], op.shape, op.dtype)


@lowers(*_BINARY)
def binary_function(build: Builder, op: Operator, a: Any, b: Any, /) -> Tensor:
    """An operator of two arguments for which functions.py has a function of the same name. A
    comparison converts them to their common dtype, all others to the result's."""
    cast_to = common_dtype(a, b) if ATEN[op.name].result else op.dtype
    return build.map(op.name, [a, b], op.shape, op.dtype, cast_to)


@lowers(*_SHIFTS)
def shift(build: Builder, op: Operator, a: Any, b: Any, /) -> Tensor:
    """The bits of `a`, shifted by `b` places to the left or to the right."""
    return build.map(_SHIFTS[op.name], [a, b], op.shape, op.dtype)


@lowers("add", "sub", "rsub")
def add(build: Builder, op: Operator, a: Any, b: Any, /, alpha: float = 1) -> Tensor:
    """a + alpha * b, a - alpha * b, or for `rsub` b - alpha * a."""
    if op.name == "rsub":
        a, b = b, a
    if alpha != 1:
        b = build.map("mul", [b, alpha], _shape(b), op.dtype)
    function = "add" if op.name == "add" else "sub"
    return build.map(function, [a, b], op.shape, op.dtype)


@lowers("div")
def divide(
    build: Builder, op: Operator, a: Any, b: Any, /, rounding_mode: str | None = None
) -> Tensor:
    """The quotient a / b. It is rounded towards zero if `rounding_mode` is "trunc", down if it is
    "floor", and not to an integer if it is None."""
    function = "div" if rounding_mode is None else f"div_{rounding_mode}"
    return build.map(function, [a, b], op.shape, op.dtype)


@lowers("floor_divide")
def floor_divide(build: Builder, op: Operator, a: Any, b: Any, /) -> Tensor:
    """The quotient a / b, rounded down."""
    return divide(build, op, a, b, rounding_mode="floor")


@lowers("reciprocal", "rsqrt")
def reciprocal(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    """1 / x, or for `rsqrt` 1 / sqrt(x)."""
    root = build.map("sqrt", [x], op.shape, op.dtype) if op.name == "rsqrt" else x
    return build.map("div", [1.0, root], op.shape, op.dtype)


@lowers("pow")
def power(build: Builder, op: Operator, base: Any, exponent: Any, /) -> Tensor:
    """The power. For the exponents 0.5, -0.5, 1, 2, 3, -1 and -2 it is computed by products, roots
    and quotients, for all others by `pow`."""
    number = float(exponent) if isinstance(exponent, int | float) else None
    if number is not None and number in _POWERS:
        return build.map(_POWERS[number], [base], op.shape, op.dtype)
    if number == -0.5:  # as in eager torch: NaN for -inf, and -inf for -0.0
        return reciprocal(build, Operator("rsqrt", op.results), base)
    if number in (-1, -2):
        denominator = build.map("square", [base], op.shape, op.dtype) if number == -2 else base
        return reciprocal(build, Operator("reciprocal", op.results), denominator)
    return build.map("pow", [base, exponent], op.shape, op.dtype)


@lowers(*_LOGICAL)
def logical(build: Builder, op: Operator, a: Any, b: Any, /) -> Tensor:
    """The logical and, or, or exclusive or. A number counts as true if it is not 0."""
    return build.map(_LOGICAL[op.name], [a, b], op.shape, "bool")


@lowers("logical_not")
def logical_not(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    """True for each element that is false or 0."""
    return build.map("bitwise_not", [x], op.shape, "bool")


@lowers("where", rows=row_rules.follow_where)
def where(build: Builder, op: Operator, condition: Any, a: Any, b: Any, /) -> Tensor:
    """`a` where the condition holds, else `b`; both are cast to the dtype of the result."""
    a, b = build.as_tensor(a, op.dtype), build.as_tensor(b, op.dtype)
    return select(build, op, build.as_tensor(condition, "bool"), a, b)


def select(build: Builder, op: Operator, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Adds the tensor of the shape of `op` that is `a` where the condition holds, else `b`. The
    condition is bool, and both others already have the dtype of `op`."""

    def choose(condition: Value, a: Value, b: Value) -> Value:
        bounds = None
        if a.bounds is not None and b.bounds is not None:
            bounds = min(a.bounds[0], b.bounds[0]), max(a.bounds[1], b.bounds[1])
        return build.values.call("select", condition, a, b, dtype=op.dtype, bounds=bounds)

    sources = [build.expand(source, op.shape) for source in (condition, a, b)]
    return build.add(Map(build.values, op.dtype, choose, sources, cost=1))


@lowers("clamp", "clamp_min", "clamp_max")
def clamp(build: Builder, op: Operator, x: Tensor, /, min: Any = None, max: Any = None) -> Tensor:
    """Each element, or the limit that it exceeds; None means that there is no such limit. NaN stays
    NaN, and -0.0 stays if a limit is 0. If `min` exceeds `max`, the result is `max`."""
    if min is not None:
        x = build.map("maximum", [min, x], op.shape, op.dtype)
    return x if max is None else build.map("minimum", [max, x], op.shape, op.dtype)


@lowers("_to_copy", "convert_element_type", rows=row_rules.follow_same_elements)
def convert(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    """`x` with the dtype of the result."""
    return build.cast(x, op.dtype)


def common_dtype(a: Any, b: Any) -> str:
    """The dtype to which torch converts two arguments, tensors or numbers, to compare them."""
    dtype = torch.result_type(_for_result_type(a), _for_result_type(b))
    return str(dtype).removeprefix("torch.")


def _for_result_type(argument: Any) -> Any:
    """An argument that `torch.result_type` takes in place of this one. For a Tensor it is one of
    torch, with the same dtype and rank: torch counts one of rank 0 less than others."""
    if isinstance(argument, Value):
        return 1  # a size is an integer that does not change the result's dtype
    if not isinstance(argument, Tensor):
        return argument
    return torch.empty([1] * len(argument.shape), dtype=getattr(torch, argument.dtype))


def _shape(argument: Any) -> tuple[int, ...]:
    """The shape of an argument: () if it is a number."""
    return tuple(argument.shape) if hasattr(argument, "shape") else ()
