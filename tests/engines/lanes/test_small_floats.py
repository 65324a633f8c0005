"""float16 and bfloat16: computed in float32 and rounded after each operator, as in eager torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.engines.lanes.harness import MOST, Function, compiled_row

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


def places(answers: Tensor, wanted: Tensor) -> Tensor:
    """The distance in units in the last place of the wanted number; of truths 0 or infinity."""
    if not wanted.is_floating_point():
        return torch.where(answers == wanted, 0.0, float("inf"))
    unit = wanted.double().abs().clamp(min=torch.finfo(wanted.dtype).tiny)
    difference = (answers.double() - wanted.double()).abs() / (unit * torch.finfo(wanted.dtype).eps)
    return torch.where(answers == wanted, 0.0, difference)  # also of infinities
