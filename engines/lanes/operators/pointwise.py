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

_UNARY = [name for name, known in ATEN.items() if known.arguments == 1 and name != "round"]
_BINARY = [name for name, known in ATEN.items() if known.arguments == 2]
_SHIFTS = {"__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift"}
_LOGICAL = {"logical_and": "bitwise_and", "logical_or": "bitwise_or", "logical_xor": "bitwise_xor"}
# Exponents for which `pow` needs no logarithm.
_POWERS = {0.5: "sqrt", 1.0: "same", 2.0: "square", 3.0: "cube"}


@lowers(*_UNARY)
def unary(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    if op.name in ("floor", "ceil", "trunc") and op.dtype in RANGES:
        return x
    of = x.dtype if ATEN[op.name].result else op.dtype
    return build.map(op.name, [x], op.shape, op.dtype, of)


@lowers("round")
def round_to(build: Builder, op: Operator, x: Tensor, /, decimals: int = 0) -> Tensor:
    """The nearest number of `decimals` places, by a product and a quotient as in eager torch."""
    if op.dtype in RANGES:
        return x
    power = 10.0 ** abs(decimals)
    to, back = ("mul", "div") if decimals > 0 else ("div", "mul")
    if decimals:
        x = build.map(to, [x, power], op.shape, op.dtype)
    x = build.map("round", [x], op.shape, op.dtype)
    return build.map(back, [x, power], op.shape, op.dtype) if decimals else x


@lowers(*_BINARY)
def binary(build: Builder, op: Operator, a: Any, b: Any, /) -> Tensor:
    of = common_dtype(a, b) if ATEN[op.name].result else op.dtype
    return build.map(op.name, [a, b], op.shape, op.dtype, of)


@lowers(*_SHIFTS)
def shift(build: Builder, op: Operator, a: Any, b: Any, /) -> Tensor:
    return build.map(_SHIFTS[op.name], [a, b], op.shape, op.dtype)


@lowers("add", "sub", "rsub")
def add(build: Builder, op: Operator, a: Any, b: Any, /, alpha: float = 1) -> Tensor:
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
    if rounding_mode is None:
        return build.map("div", [a, b], op.shape, op.dtype)
    return build.map(f"div_{rounding_mode}", [a, b], op.shape, op.dtype)


@lowers("floor_divide")
def floor_divide(build: Builder, op: Operator, a: Any, b: Any, /) -> Tensor:
    return divide(build, op, a, b, "floor")


@lowers("reciprocal", "rsqrt")
def reciprocal(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    root = build.map("sqrt", [x], op.shape, op.dtype) if op.name == "rsqrt" else x
    return build.map("div", [1.0, root], op.shape, op.dtype)


@lowers("pow")
def power(build: Builder, op: Operator, base: Any, exponent: Any, /) -> Tensor:
    """A power: by products or roots for common exponents, else by `pow`."""
    number = float(exponent) if isinstance(exponent, int | float) else None
    known = None if number is None else _POWERS.get(number)
    if known is not None:
        return build.map(known, [base], op.shape, op.dtype)
    if number == -0.5:  # as in eager torch: NaN for -inf, and -inf for -0.0
        return reciprocal(build, Operator("rsqrt", op.results), base)
    if number in (-1, -2):
        square = build.map("square", [base], op.shape, op.dtype) if number == -2 else base
        return reciprocal(build, Operator("reciprocal", op.results), square)
    return build.map("pow", [base, exponent], op.shape, op.dtype)


@lowers(*_LOGICAL)
def logical(build: Builder, op: Operator, a: Any, b: Any, /) -> Tensor:
    return build.map(_LOGICAL[op.name], [a, b], op.shape, "bool")


@lowers("logical_not")
def logical_not(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    return build.map("bitwise_not", [x], op.shape, "bool")


@lowers("where", rows=row_rules.where)
def where(build: Builder, op: Operator, condition: Any, a: Any, b: Any, /) -> Tensor:
    one, other = build.tensor(a, op.dtype), build.tensor(b, op.dtype)
    return select(build, op, build.tensor(condition, "bool"), one, other)


def select(build: Builder, op: Operator, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a` where the condition holds, else `b`."""

    def call(chosen: Value, one: Value, other: Value) -> Value:
        bounds = None
        if one.bounds is not None and other.bounds is not None:
            bounds = min(one.bounds[0], other.bounds[0]), max(one.bounds[1], other.bounds[1])
        return build.values.call("select", chosen, one, other, dtype=op.dtype, bounds=bounds)

    given = [build.expand(each, op.shape) for each in (condition, a, b)]
    return build.add(Map(build.values, op.dtype, call, given, 1))


@lowers("clamp", "clamp_min", "clamp_max")
def clamp(build: Builder, op: Operator, x: Tensor, /, min: Any = None, max: Any = None) -> Tensor:
    """NaN stays NaN, -0.0 stays if a limit is 0. If `min` exceeds `max`, the result is `max`."""
    if min is not None:
        x = build.map("maximum", [min, x], op.shape, op.dtype)
    return x if max is None else build.map("minimum", [max, x], op.shape, op.dtype)


@lowers("_to_copy", "convert_element_type", rows=row_rules.same)
def convert(build: Builder, op: Operator, x: Tensor, /) -> Tensor:
    return build.cast(x, op.dtype)


def common_dtype(a: Any, b: Any) -> str:
    """The dtype to which torch converts two arguments before it compares them."""
    dtype = torch.result_type(_for_result_type(a), _for_result_type(b))
    return str(dtype).removeprefix("torch.")


def _for_result_type(given: Any) -> Any:
    """What `torch.result_type` needs of an argument: a number, or a tensor of the same dtype and
    rank. A tensor of rank 0 counts less than others."""
    if isinstance(given, Value):
        return 1  # a size is an integer that does not change the result's dtype
    if not isinstance(given, Tensor):
        return given
    return torch.empty([1] * len(given.shape), dtype=getattr(torch, given.dtype))


def _shape(given: Any) -> tuple[int, ...]:
    return tuple(given.shape) if hasattr(given, "shape") else ()
