"""Quotients and remainders of integers by 0 are 0 in every engine that takes the program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines import Portable, Target, engine
from runtime.session.session import Session
from stages.capture import Capture, capture
from stages.reference.answers import Reference
from tests.engines.lanes.harness import MOST, Compiled, signature_of

NAMES = ("floor", "trunc", "remainder", "fmod", "bounded", "long")


class Divides(nn.Module):
    """Divisions by a column, and one whose divisor is never 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("none", torch.zeros(1))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return (
            a // b,
            torch.div(a, b, rounding_mode="trunc"),
            a % b,
            torch.fmod(a, b),
            a // b.clamp(min=1),
            a.long() // b.long() + 1,
        )


A = torch.arange(-32, 32, dtype=torch.int32).unsqueeze(1).repeat(1, 2)
B = torch.tensor([3, -5], dtype=torch.int32).repeat(MOST, 1)
SIGNATURE = signature_of([A, B], dict(zip(NAMES, Divides()(A, B), strict=True)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    inputs = {
        bound.name: {c: each[:, k].clone() for k, c in enumerate(bound.block.columns)}
        for bound, each in zip(SIGNATURE.inputs, (A, B), strict=True)
    }
    folder = tmp_path_factory.mktemp("capture")
    return capture(Divides().eval(), SIGNATURE, inputs, folder, "none")


def test_a_note_says_so_at_each_division(made: Capture) -> None:
    (note,) = [n for n in Reference.load(made.reference).notes if "integer division" in n]
    assert note.count("test_integer_division.py") == 5


@pytest.mark.parametrize(
    "name", ["lanes", "exported", pytest.param("aoti", marks=pytest.mark.long)]
)
def test_a_divisor_of_0_gives_0(made: Capture, name: str, tmp_path: Path) -> None:
    files = engine(name).compile(Portable(made.program, None), Target.parse("cpu"), {}, tmp_path)
    opened = engine(name).open(tmp_path / files[0] if files else made.program, torch.device("cpu"))
    run = Compiled(Divides(), SIGNATURE, Session(SIGNATURE, opened))
    divisors = B.clone()
    divisors[::3] = 0
    answers, zero, ones = run(A, divisors), divisors == 0, divisors.masked_fill(divisors == 0, 1)
    with pytest.raises(RuntimeError, match="ZeroDivision"):
        run.eager(A, divisors)
    for output, wanted in run.eager(A, ones).items():
        known = wanted if output == "bounded" else wanted.masked_fill(zero, int(output == "long"))
        assert torch.equal(answers[output], known), output
