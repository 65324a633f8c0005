"""Small models as users write them: one that is accepted, and one for each kind of refusal.

A line that a refusal must name carries a comment `# line: <word>`; `line_of` finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

FEATURES = ("a", "b", "c", "d", "e", "f")
CLASSES = ("x", "y", "z")


def line_of(word: str) -> str:
    """`mlps.py:<number>` of the line marked with that word."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# line: {word}")]
    return f"{Path(__file__).name}:{number}"


class Core(nn.Module):
    """Its first operation is pointwise: compiled code that trusts strides reads wrong elements."""

    def __init__(self, seed: int = 0, hidden: int = 48) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Linear(len(FEATURES), hidden)
            self.last = nn.Linear(hidden, len(CLASSES))
            self.last.weight.data *= 8  # clear decisions, so that a wrong input shows

    def core(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(torch.log1p(x.abs())))
        return torch.softmax(self.last(hidden), dim=-1)


class PointwiseFirst(Core):
    def forward(self, x: Tensor) -> Tensor:
        return self.core(x)


class MutatesInput(Core):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.core(x)


class MutatesInputByView(Core):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0.0
        return self.core(x)


class CountsCalls(Core):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)  # line: mutates buffer
        return self.core(x)


class BakesRows(Core):
    """37 is the row count with which capture exports, so the eager check passes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.core(x)
        return y + torch.zeros(37, 3)  # line: bakes rows


class LoopsOverRows(Core):
    def forward(self, x: Tensor) -> Tensor:
        rows = [self.core(x[i : i + 1]) for i in range(x.shape[0])]  # line: loops over rows
        return torch.cat(rows) if rows else x[:, :3]


class RootOfRows(Core):
    def forward(self, x: Tensor) -> Tensor:
        return self.core(x) / math.sqrt(x.shape[0] + 1)  # line: root of rows


class CountsRows(Core):
    def forward(self, x: Tensor) -> Tensor:
        return self.core(x) / (1 + len(x))  # line: counts rows


class NumberFromData(Core):
    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return self.core(x) * int(k.sum())


class BranchesOnRows(Core):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 100:  # line: branches on rows
            return self.core(x) * 2
        return self.core(x)


class BranchesOnData(Core):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # line: branches on data
            return self.core(x)
        return self.core(x) * 2


class PacksSteps(Core):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.GRU(1, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        steps = x[:, :2, None]
        length = (steps > 0).sum((1, 2)).clamp(min=1)
        packed = pack_padded_sequence(steps, length, batch_first=True, enforce_sorted=False)
        _, last = self.steps(packed)  # line: packs steps
        found: Tensor = self.core(x) + last[0]
        return found


class FailsWithoutRows(Core):
    def forward(self, x: Tensor) -> Tensor:
        return self.core(x - x.amax(dim=0))  # line: fails without rows


class Raises(Core):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == len(FEATURES):
            raise ValueError("no detector, no answer")  # line: raises
        return self.core(x)


class NamedOutputs(Core):
    """Returns a dict; torch.jit can neither script its comprehension nor trace a dict output."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.core(x)
        parts: Any = {"last": y[:, 2], "first": y[:, 0]}
        return {name: value for name, value in parts.items()}


class OnlyTraces(Core):
    """torch.jit cannot script a lambda."""

    def forward(self, x: Tensor) -> Tensor:
        twice: Callable[[Tensor], Tensor] = lambda t: t + t  # noqa: E731
        return self.core(twice(x))


class TraceForgets(Core):
    """torch.export keeps the row count as a symbol; a trace keeps the number that it saw."""

    def forward(self, x: Tensor) -> Tensor:
        twice: Callable[[Tensor], Tensor] = lambda t: t + t  # noqa: E731
        n = x.shape[0]
        return self.core(twice(x)) / (
            torch.sym_max(n, 20) if isinstance(n, torch.SymInt) else max(int(n), 20)
        )


class ReadsPadding(Core):
    """Right on row-major memory only: it reads the storage as if it were row-major."""

    def forward(self, x: Tensor) -> Tensor:
        return self.core(torch.as_strided(x, (x.shape[0], 6), (6, 1)))


class SpecialAtOneRow(Core):
    """torch.export takes a dynamic size for neither 0 nor 1: it drops this branch silently."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return self.core(x) * 0.5
        return self.core(x)


class NanAndInf(Core):
    """NaN where the first feature is negative, infinite where the second is."""

    def forward(self, x: Tensor) -> Tensor:
        nan = torch.where(x[:, :1] < 0, float("nan"), 0.0)
        infinite = torch.where(x[:, 1:2] < 0, float("-inf"), 0.0)
        return torch.cat([self.core(x)[:, :2] + nan, infinite], dim=1)


class Affine(nn.Module):
    """A weighted sum of every input, with another weight for every element of a row.

    It takes and gives any shapes, for layout tests, in which only the order of elements matters.
    """

    def __init__(
        self, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], scalars: list[bool]
    ) -> None:
        super().__init__()
        self.outputs = outputs
        self.scalars = scalars
        width = sum(torch.Size(shape).numel() for shape in inputs)
        for k, shape in enumerate(outputs):
            count = torch.Size(shape).numel()
            # Whole numbers, so that sums are exact in any order.
            weights = torch.arange(width * count).reshape(width, count) * 7 % 23 - 11
            self.register_buffer(f"weights_{k}", weights.float())

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        n = next((x.shape[0] for x, s in zip(given, self.scalars, strict=True) if not s), 0)
        parts = [
            x.reshape(1, -1).expand(n, -1) if s else x.flatten(1)
            for x, s in zip(given, self.scalars, strict=True)
        ]
        row = torch.cat(parts, dim=1)
        return tuple(
            (row @ self.get_buffer(f"weights_{k}")).unflatten(1, shape)
            for k, shape in enumerate(self.outputs)
        )


def build(seed: int = 0, hidden: int = 48) -> nn.Module:
    """A factory for the `model` of a config."""
    return PointwiseFirst(seed, hidden)


def broken() -> nn.Module:
    raise RuntimeError("no such year of data taking")
