"""float16 and bfloat16: computed in float32 and rounded after each operator, as in eager torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.engines.lanes.harness import MOST, Function, bits, compiled_row

F = torch.nn.functional
torch.manual_seed(5)
W, KERNEL, BIAS = torch.randn(5, 6), torch.randn(4, 3, 3), torch.randn(4)
# Eager torch takes other steps here: it may round between them, or add in another order. Its gelu
# subtracts nearly equal numbers where x is far below 0.
CLOSE = {"gelu", "log_softmax", "product", "power of 3", "power of -2"}
ALSO_BFLOAT16 = ("matmul", "linear", "conv1d", "sum, then a product", "softmax", "layer norm",
                 "times a number", "plus a number", "above a number", "put by a mask")  # fmt: skip
CALLS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x @ x.transpose(1, 2),
    "weights": lambda x: x @ W.t().to(x.dtype),
    "linear": lambda x: F.linear(x, W.to(x.dtype), BIAS[:1].to(x.dtype).expand(5)),
    "addmm": lambda x: torch.addmm(BIAS[:1].to(x.dtype), x[:, 0], W.t().to(x.dtype), alpha=0.3),
    "conv1d": lambda x: F.conv1d(x, KERNEL.to(x.dtype), BIAS.to(x.dtype)),
    "sum, then a product": lambda x: x.sum(2) * 3.3,
    "mean": lambda x: x.mean((1, 2)),
    "sum in float32": lambda x: x.sum(2, dtype=torch.float32),
    "largest": lambda x: x.amax(2),
    "sorted": lambda x: x.sort(2).values,
    "variance": lambda x: x.var(2),
    "product": lambda x: x[:, :, :3].prod(2),
    "cumsum": lambda x: x.cumsum(2),
    "softmax": lambda x: x.softmax(2),
    "log_softmax": lambda x: x.log_softmax(2),
    "layer norm": lambda x: F.layer_norm(x, (6,), W[0].to(x.dtype)),
    "norm": lambda x: x.norm(dim=2),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "times a number": lambda x: x * 3.3,
    "plus a number": lambda x: x + 3.3,
    "minus a number": lambda x: 3.3 - x,
    "plus a multiple": lambda x: torch.add(x, x.flip(2), alpha=0.5),
    "over a number": lambda x: x / 3.3,
    "a number over it": lambda x: 3.3 / x,
    "rest": lambda x: x % 1.7,
    "power of 1.3": lambda x: x.abs() ** 1.3,
    "power of 3": lambda x: x**3,
    "power of -2": lambda x: x**-2,
    "above a number": lambda x: x > 0.3,
    "times a scalar tensor": lambda x: x * torch.tensor(3.3),
    "plus a scalar tensor": lambda x: x + torch.tensor(3.3),
    "times weights": lambda x: x * W[0].to(x.dtype),
    "gelu": F.gelu,
    "silu": F.silu,
    "pool": lambda x: F.avg_pool1d(x, 3),
    "put by a mask": lambda x: x.index_put((x > 0,), torch.tensor(0.1, dtype=x.dtype)),
    "views": lambda x: torch.cat([x[:, ::2], x.flip(1)[:, :1]], 1).transpose(1, 2) * 1,
    "gathered": lambda x: x.gather(2, x.argsort(dim=2, stable=True)),
    "scatter_add": lambda x: x.scatter_add(2, torch.tensor([[[0, 1, 1]]]).expand(
        x.shape[0], 3, 3), x[:, :, 3:]),
    "from int": lambda x: (x * 100).long().to(x.dtype) * 0.1,
}  # fmt: skip
# Integers, and numbers of float32, that are no numbers of 16 bits.
INTEGERS = torch.tensor([257, 2049, 2051])
TENTH = torch.tensor(0.1)
MIXED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, k: x + k,
    "add_multiple": lambda x, k: torch.add(k, x, alpha=0.1),
    "sub": lambda x, k: k - x,
    "mul": lambda x, k: x * k,
    "div": lambda x, k: k / x,
    "div_floor": lambda x, k: x // k,
    "div_trunc": lambda x, k: torch.div(x, k, rounding_mode="trunc"),
    "remainder": lambda x, k: k % x,
    "fmod": lambda x, k: torch.fmod(k, x),
    "pow": lambda x, k: torch.pow(k, x / 9),
    "atan2": lambda x, k: torch.atan2(x, k),
    "hypot": lambda x, k: torch.hypot(x, k),
    "copysign": lambda x, k: torch.copysign(k, -x),
    "maximum": lambda x, k: torch.maximum(x, k),
    "where": lambda x, k: torch.where(x > 2, x, k),
    "constant_add": lambda x, k: x + INTEGERS,
    "constant_mul": lambda x, k: INTEGERS * x,
    "number_add": lambda x, k: x + 2049,
    "number_sub": lambda x, k: 257 - x,
    "number_rsub": lambda x, k: torch.rsub(x, 257, alpha=2),
    "number_sub_multiple": lambda x, k: torch.sub(x, 257.3, alpha=0.1),
    "number_mul": lambda x, k: x * 257,
    "number_div": lambda x, k: x / 2049,
    "number_over": lambda x, k: 2049 / x,
    "number_div_floor": lambda x, k: x * 100 // 2.3,
    "number_over_floor": lambda x, k: 0.1 // x,
    "number_remainder": lambda x, k: (x * 100) % 259,
    "number_fmod": lambda x, k: torch.fmod(x * 1000, 2051),
    "number_remainder_of": lambda x, k: torch.remainder(2051, x),
    "number_pow": lambda x, k: 257 ** (x / 9),
    "tensor_add": lambda x, k: 1 + (torch.tensor(2049) + x),
    "tensor_mul": lambda x, k: x * TENTH,
    "tensor_mul_first": lambda x, k: TENTH * x,
    "tensor_div": lambda x, k: x / torch.tensor([2049]),
    "tensor_div_first": lambda x, k: TENTH / x,
    "tensor_atan2": lambda x, k: torch.atan2(x, TENTH),
    "tensor_hypot": lambda x, k: torch.hypot(x, torch.tensor(257.0)),
    "full": lambda x, k: torch.full_like(x, 0.1) * x,
    "full_in_float64": lambda x, k: torch.full_like(x, 0.1).double(),
    "new_full": lambda x, k: x.new_full((len(x), 3), 257).float(),
    "ones": lambda x, k: torch.ones_like(x) * 257 - x,
}


class Call(NamedTuple):
    """One of CALLS, on numbers of a small dtype."""

    dtype: torch.dtype
    title: str

    def __call__(self, x: Tensor) -> Tensor:
        """The result for float32 numbers: (rows, elements of a row)."""
        return CALLS[self.title](x.to(self.dtype)).reshape(x.shape[0], -1)

    def difference(self, answers: Tensor, wanted: Tensor) -> str:
        """How far answers are from eager torch's; empty if near enough."""
        same = float((answers == wanted).double().mean())
        off = float(places(answers, wanted).max())
        # A sum in another order may round to the neighbour, in few cases.
        least_same, most_off = (0.5, 3) if self.title in CLOSE else (0.98, 1)
        near = same >= least_same and off <= most_off
        return "" if near else f"{same:.0%} the same, {off} places"


@pytest.mark.usefixtures("quick_compiler")
def test_small_floats_are_rounded_as_in_eager_torch() -> None:
    # The same numbers in each run: for some, eager subtracts nearly equal ones.
    x = torch.randn(MOST, 3, 6, generator=torch.Generator().manual_seed(5))
    calls = [Call(torch.float16, title) for title in CALLS]
    calls += [Call(torch.bfloat16, title) for title in ALSO_BFLOAT16]
    groups: dict[str, list[Call]] = {}  # one output for each dtype of results
    for call in calls:
        groups.setdefault(str(call(x).dtype).removeprefix("torch."), []).append(call)
    outputs = {
        dtype: lambda x, group=group: torch.cat([call(x) for call in group], 1)
        for dtype, group in groups.items()
    }
    answers = compiled_row(Function(outputs), [x], list(outputs))(x)
    wrong: dict[Call, str] = {}
    for dtype, group in groups.items():
        expected = [call(x) for call in group]
        parts = answers[dtype].split([wanted.shape[1] for wanted in expected], 1)
        for call, part, wanted in zip(group, parts, expected, strict=True):
            if difference := call.difference(part, wanted):
                wrong[call] = difference
    assert wrong == {}


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_integers_and_numbers_beside_small_floats_are_rounded_as_in_eager_torch(
    dtype: torch.dtype,
) -> None:
    x = torch.tensor([[0.5, 1, 3], [7.25, -0.1, 0.3], [5, 9, -100], [1.75, 2.5, 40]]).to(dtype)
    k = torch.tensor([[257, 259, 2051], [2051, 3001, -261], [4099, 2049, 1025], [511, 33, 300]])
    # So many that eager torch fills whole vectors: in the rest it rounds alpha * b, too.
    x, k = x.repeat(16, 1), k.repeat(16, 1)
    program = compiled_row(Function(MIXED), [x, k], list(MIXED))
    answers, wanted = program(x, k), program.eager(x, k)
    wrong = [name for name in MIXED if bits(answers[name]) != bits(wanted[name])]
    assert wrong == []


def places(answers: Tensor, wanted: Tensor) -> Tensor:
    """The distance in units in the last place of the wanted number; of truths 0 or infinity."""
    if not wanted.is_floating_point():
        return torch.where(answers == wanted, 0.0, float("inf"))
    unit = wanted.double().abs().clamp(min=torch.finfo(wanted.dtype).tiny)
    difference = (answers.double() - wanted.double()).abs() / (unit * torch.finfo(wanted.dtype).eps)
    return torch.where(answers == wanted, 0.0, difference)  # also of infinities
