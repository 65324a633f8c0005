"""Functions of one number, at numbers where their results change class: signs of zero, subnormal
numbers, overflow, infinities and NaN."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines.target import host_targets
from tests.engines.lanes.harness import MOST, Function, compiled_row

F = torch.nn.functional
LEAST, TINY, MOST_FLOAT = 2.0**-149, 2.0**-126, 3.4028234663852886e38
POSITIVE = (
    0.0, LEAST, 2 * LEAST, 1e-40, TINY - LEAST, TINY, 1e-30, 2.0**-24, 1e-8, 1e-4, 0.5, 0.999999,
    1.0, 1.0000001, 1.5, 2.0, 3.0, 9.01, 15.0, 20.5, 44.5, 88.0, 88.72283, 88.7229, 89.4159, 103.9,
    104.5, 127.9999, 128.0, 1e10, 2.0**31, 1e19, 1.8446743e19, MOST_FLOAT, math.inf,
)  # fmt: skip
VALUES = torch.tensor([*POSITIVE, *(-x for x in POSITIVE), math.nan])
NAMES = (
    "abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad erf erfc exp exp2 expm1 floor "
    "frac isfinite isinf isnan isneginf isposinf log log10 log1p log2 logit nan_to_num neg rad2deg "
    "reciprocal round rsqrt sigmoid sign sgn sin sinc sinh sqrt square tan tanh trunc"
)
LAYERS = (
    "relu relu6 elu selu celu gelu silu mish softplus softsign softshrink hardshrink hardtanh "
    "hardsigmoid hardswish logsigmoid tanhshrink leaky_relu"
)
POWERS = (-3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 2.5, 3, 4, 1 / 3)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in NAMES.split()},
    **{name: getattr(F, name) for name in LAYERS.split()},
    **{f"x ** {k:.3g}": partial(torch.pow, exponent=k) for k in POWERS},
    "2 ** x": lambda x: 2.0**x,
    "0.5 ** x": lambda x: 0.5**x,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 0.5, -1.0),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp_min": lambda x: x.clamp(min=0.0),
    "x / 3": lambda x: x / 3,
    "3 / x": lambda x: 3 / x,
    "x * -0.0": lambda x: x * -0.0,
    "x + 0.0": lambda x: x + 0.0,
    "x - x": lambda x: x - x,
    "fmod": lambda x: torch.fmod(x, 1.7),
    "remainder": lambda x: torch.remainder(x, -1.7),
    "floor_divide": lambda x: torch.div(x, 1.7, rounding_mode="floor"),
    "div, trunc": lambda x: torch.div(x, -1.7, rounding_mode="trunc"),
    "atan2": lambda x: torch.atan2(x, torch.tensor(-1.0)),
    "atan2 of 0": lambda x: torch.atan2(torch.tensor(0.0), x),
    "hypot": lambda x: torch.hypot(x, torch.tensor(1.0)),
    "copysign": lambda x: torch.copysign(torch.tensor(2.0), x),
    "xlogy": lambda x: torch.xlogy(x, x),
    "ldexp": lambda x: torch.ldexp(x, torch.tensor(3)),
    "logaddexp": lambda x: torch.logaddexp(x, torch.tensor(0.0)),
    "logaddexp2": lambda x: torch.logaddexp2(x, torch.tensor(0.0)),
    "heaviside": lambda x: torch.heaviside(x, torch.tensor(0.5)),
    "maximum": lambda x: torch.maximum(x, torch.tensor(0.0)),
    "minimum": lambda x: torch.minimum(x, torch.tensor(-0.0)),
    "fmax": lambda x: torch.fmax(x, torch.tensor(-1.0)),
    "lerp": lambda x: torch.lerp(x, torch.tensor(1.0), 0.5),
    "entr": torch.special.entr,
    "ndtr": torch.special.ndtr,
    "to int64 and back": lambda x: x.clamp(-1e9, 1e9).long().float(),
    "square root of squares": lambda x: (x * x).sqrt(),
    "softmax": lambda x: torch.stack([x, -x], 1).softmax(1)[:, 0],
    "log_softmax": lambda x: torch.stack([x, x * 0.5], 1).log_softmax(1)[:, 0],
    "logsumexp": lambda x: torch.stack([x, x * 0.5], 1).logsumexp(1),
    "norm": lambda x: torch.stack([x, x * 0.5], 1).norm(dim=1),
    "normalize": lambda x: F.normalize(torch.stack([x, x * 0.5], 1), dim=1)[:, 0],
}


PADDED = torch.cat([VALUES, torch.full((-len(VALUES) % MOST,), 0.5)])  # eager's vectors are full
INTEGERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # Compilers may take each of these for a constant, or for x.
    "the next is larger": lambda x, y: x + 1 > x,
    "the one before is smaller": lambda x, y: x - 1 < x,
    "the negative one is negative": lambda x, y: -x < 0,
    "a size is negative": lambda x, y: x.abs() < 0,
    "a square is negative": lambda x, y: x * x < 0,
    "three times is positive": lambda x, y: x * 3 > 0,
    "a half of the double": lambda x, y: (x * 2) // 2,
    "hashed": lambda x, y: (x * 40503 + 12345) % 100,
    # A number becomes one of the dtype first.
    "a quotient by -3": lambda x, y: x // -3,
    "a remainder of -7": lambda x, y: torch.remainder(x, -7),
    "a remainder of -7, with the sign of x": lambda x, y: torch.fmod(x, -7),
    "between -5 and 100": lambda x, y: x.clamp(-5, 100),
    "times 1000": lambda x, y: x * 1000,
    "quotient": lambda x, y: torch.div(x, y + (y == 0), rounding_mode="trunc"),
    "quotient downwards": lambda x, y: torch.div(x, y + (y == 0), rounding_mode="floor"),
    "remainder": lambda x, y: torch.remainder(x, y + (y == 0)),
    "shifts": lambda x, y: ((x << 3) >> 2) + (x << 40) + (x >> 40) + (x >> (y & 7)),
    "bits": lambda x, y: (x & 12) ^ ~y | 5,
    "powers": lambda x, y: x**2 - y**3,
    "any": lambda x, y: torch.stack([x, y], 1).any(1),
    "all": lambda x, y: torch.stack([x, y], 1).all(1),
    "where the largest is": lambda x, y: torch.stack([x, y, x], 1).max(1).indices,
    "sum": lambda x, y: torch.stack([x, y, x], 1).sum(1),
    "products": lambda x, y: torch.stack([x, y, x], 1).cumprod(1)[:, -1],
    "as bytes": lambda x, y: x.to(torch.int8) + x.to(torch.uint8),
    "as float32": lambda x, y: x.float() + y.float(),
}
BOOLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "any": INTEGERS["any"],
    "all": INTEGERS["all"],
    "where the largest is": INTEGERS["where the largest is"],
    "where the least is": lambda x, y: torch.stack([x, y, x], 1).min(1).indices,
    "sum": INTEGERS["sum"],
    "the largest": lambda x, y: torch.stack([x, y], 1).amax(1),
    "sorted": lambda x, y: torch.stack([x, y, x], 1).sort(1).values[:, 0],
    "product": lambda x, y: x * y + x,
}
BEST = {"x86-64-v3": "AVX2", "x86-64-v4": "AVX-512"}.get(host_targets("cpu")[0].arch)
DOCUMENT = Path(__file__).parents[3] / "docs" / "concepts" / "lanes.md"


def kinds(numbers: Tensor) -> list[str]:
    """The class of each number: nan, or 0, inf or finite, each with "-" if its sign is negative."""
    return [kind(number) for number in numbers.tolist()]


def kind(number: float) -> str:
    """The class of a number."""
    if math.isnan(number):
        return "nan"
    sign = "-" if math.copysign(1.0, number) < 0 else ""
    if math.isinf(number):
        return f"{sign}inf"
    return f"{sign}finite" if number else f"{sign}0"


@dataclass(frozen=True)
class Row:
    """A row of the table in the document: at `first` to `last`, the classes of the results."""

    functions: tuple[str, ...]
    first: float
    last: float
    eager: str
    lanes: str
    here: bool
    """Whether eager torch uses the processor for which the row is."""

    def holds(self, function: str, at: float, eager: str, lanes: str) -> bool:
        """Whether it documents these classes of a function's results at a number."""
        inside = self.here and function in self.functions and self.first <= at <= self.last
        return inside and (self.eager, self.lanes) == (eager, lanes)


def documented() -> list[Row]:
    """The rows of the table `function | numbers from | to | eager torch | lanes`."""
    text = DOCUMENT.read_text().partition("| function | numbers from | to |")[2]
    rows = []
    for line in text.splitlines()[2:]:
        if not line.startswith("|"):
            break
        title, first, last, eager, lanes = (cell.strip() for cell in line.strip("|").split("|"))
        names, _, processor = title.partition(" with ")  # such as "with AVX2"
        functions = tuple(name.strip("` ") for name in names.split(", "))
        here = processor in ("", BEST)
        rows.append(Row(functions, float(first), float(last), eager, lanes, here))
    return rows


@pytest.mark.usefixtures("quick_compiler")
def test_the_class_of_each_result_is_that_of_eager_torch_or_documented() -> None:
    """And each row of the document that is for this processor holds somewhere."""

    def every(x: Tensor) -> Tensor:
        return torch.stack([call(x[:, 0]).float() for call in FUNCTIONS.values()], 1)

    library = compiled_row(Function({"y": every}), [torch.full((MOST, 1), 0.5)], ["y"])
    parts = PADDED.unsqueeze(1).split(MOST)
    answers = torch.cat([library(part)["y"] for part in parts])[: len(VALUES)]
    rows, seen = documented(), set[Row]()
    wrong: list[str] = []
    for k, (function, call) in enumerate(FUNCTIONS.items()):
        expected = kinds(call(PADDED).float()[: len(VALUES)])
        for at, eager, lanes in zip(VALUES.tolist(), expected, kinds(answers[:, k]), strict=True):
            known = [row for row in rows if row.holds(function, at, eager, lanes)]
            seen.update(known)
            if eager != lanes and not known:
                wrong.append(f"{function} of {at:.9g}: {lanes}, in eager torch {eager}")
    assert wrong == []
    assert BEST is None or {row for row in rows if row.here} == seen


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_are_those_of_eager_torch_also_where_they_overflow(dtype: torch.dtype) -> None:
    limits, drawn = torch.iinfo(dtype), torch.Generator().manual_seed(1)
    shape = (2, MOST, 1)
    x, y = torch.randint(limits.min, limits.max, shape, dtype=torch.int64, generator=drawn)
    ends = torch.tensor([limits.min, limits.min + 1, limits.max - 1, limits.max, 0, 1])
    x[:6, 0], y[3:9, 0] = ends, ends
    require_answers_of_eager(INTEGERS, x.to(dtype), y.to(dtype))


def test_bools_are_those_of_eager_torch() -> None:
    x, y = torch.arange(MOST)[:, None] % 2 == 0, torch.arange(MOST)[:, None] % 3 == 0
    require_answers_of_eager(BOOLS, x, y)


def test_integers_of_64_bits_become_float32_with_one_rounding() -> None:
    """Through float64 they are rounded twice: 2^60 + 2^36 + 1 loses its 1, then half a unit."""
    half_units = [2**e + k * 2 ** (e - 24) for e in range(53, 63) for k in (1, 3)]
    beside = [x + lost for x in half_units for lost in (-1, 0, 1)]
    ends = torch.iinfo(torch.int64)
    x = torch.tensor([*beside, ends.min, ends.max, 2**53 + 1, -1])[:MOST, None]
    functions = {"of x": lambda x, y: x.float() + y, "of -x": lambda x, y: (-x).float()}
    require_answers_of_eager(functions, x, torch.zeros_like(x, dtype=torch.float32))


def test_angles_of_float64_are_right_at_any_size() -> None:
    """Also at the doubles that come nearest to a multiple of pi/2, below and above 2^30."""
    near = [6381956970095103 * 2.0**797, 5.319372648326541e255, 715392349.9834924, math.pi]
    sizes = [math.ldexp(1.2345678901234567, e) for e in range(-20, 1024, 24)]
    ends = [2.0**30 - 2.0**-23, 2.0**30, 1e10 + 0.123, 1e30, 1e40, sys.float_info.max]
    positive = [*near, *ends, *sizes, math.inf]
    x = torch.tensor([*positive, *(-x for x in positive), math.nan], dtype=torch.float64)
    functions = {"sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "sinc": torch.sinc}
    require_close_to_eager(functions, x.unsqueeze(1))


def test_hypot_of_float64_neither_overflows_nor_underflows() -> None:
    numbers = [1e200, 1e-200, 1e10, 1.0, 0.0, 5e-324, 3e-310, 1.7e308, 2.0**500, 2.0**-450]
    numbers += [-3e160, math.inf, math.nan]
    x, y = torch.cartesian_prod(*[torch.tensor(numbers, dtype=torch.float64)] * 2).unbind(1)
    require_close_to_eager({"hypot": torch.hypot}, x[:, None], y[:, None])


def require_close_to_eager(functions: dict[str, Callable[..., Tensor]], *inputs: Tensor) -> None:
    """Requires, in float64, the answers of eager torch to a few units in the last place, in calls
    of at most MOST rows."""
    program = compiled_row(Function(functions), [x[:MOST] for x in inputs], list(functions))
    for part in zip(*(x.split(MOST) for x in inputs), strict=True):
        answers, wanted = program(*part), program.eager(*part)
        for name in functions:
            torch.testing.assert_close(
                answers[name], wanted[name], rtol=1e-15, atol=5e-324, equal_nan=True
            )


@pytest.mark.parametrize("operator", [torch.bitwise_or, torch.bitwise_xor, torch.add])
def test_a_bool_of_two_is_0_or_1_as_a_number(
    operator: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Alone in its program, so that one expression computes the number."""
    x, y = torch.arange(MOST)[:, None] % 2 == 0, torch.arange(MOST)[:, None] % 3 == 0
    functions = {operator.__name__: lambda x, y: operator(x > y, y > x).long()}
    require_answers_of_eager(functions, x, y)


def require_answers_of_eager(
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]], x: Tensor, y: Tensor
) -> None:
    """Requires the same bits and dtypes as in eager torch, in one call and with each row alone."""
    names = [f"y{k}" for k in range(len(functions))]
    model = Function(dict(zip(names, functions.values(), strict=True)))
    program = compiled_row(model, [x, y], names)
    answers, wanted = program(x, y), program.eager(x, y)
    for name, what in zip(names, functions, strict=True):
        assert answers[name].dtype == wanted[name].dtype, what
        assert torch.equal(answers[name], wanted[name].reshape(answers[name].shape)), what
