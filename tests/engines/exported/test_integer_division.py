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
def captured(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    inputs = {
        bound.name: {name: values[:, k].clone() for k, name in enumerate(bound.block.columns)}
        for bound, values in zip(SIGNATURE.inputs, (A, B), strict=True)
    }
    folder = tmp_path_factory.mktemp("capture")
    return capture(Divides().eval(), SIGNATURE, inputs, folder, "none")


def test_a_note_has_the_line_of_each_division_by_a_column(captured: Capture) -> None:
    (note,) = [n for n in Reference.load(captured.reference).notes if "integer division" in n]
    assert note.count("test_integer_division.py") == len(NAMES) - 1  # "bounded" divides by no 0


@pytest.mark.parametrize(
    "name", ["lanes", "exported", pytest.param("aoti", marks=pytest.mark.long)]
)
def test_a_divisor_of_0_gives_0(captured: Capture, name: str, tmp_path: Path) -> None:
    """The output "long" adds 1 to its quotient. Eager torch raises an error, so the answers for
    other divisors come from a call with 1 in place of each 0."""
    source = Portable(captured.program, None)
    files = engine(name).compile(source, Target.parse("cpu"), {}, tmp_path)
    artifact = tmp_path / files[0] if files else captured.program  # `exported` makes no file
    session = Session(SIGNATURE, engine(name).open(artifact, torch.device("cpu")))
    divides = Compiled(Divides(), SIGNATURE, session)
    divisors = B.clone()
    divisors[::3] = 0
    zero = divisors == 0
    answers = divides(A, divisors)
    with pytest.raises(RuntimeError, match="ZeroDivision"):
        divides.eager(A, divisors)
    for output, wanted in divides.eager(A, divisors.masked_fill(zero, 1)).items():
        if output != "bounded":
            wanted = wanted.masked_fill(zero, 1 if output == "long" else 0)
        assert torch.equal(answers[output], wanted), output
