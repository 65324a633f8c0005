"""A model whose rows depend on each other gets no program for one row."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from engines import EngineError, Portable, Target, engine
from engines.exported import load_program, why_dependent
from soa import Block, Layout, RowRange, Signature, column
from stages.reference import random_inputs
from tests.models.building import exported

SIGNATURE = Signature.build(
    {"rows": Layout([column("x", "float32")]), "answers": Layout([column("y", "float32")])},
    [Block("x", "rows", ("x",))],
    [Block("y", "answers", ("y",))],
    {"n": RowRange(0, 100)},
)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class ManyOrFew(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + x.shape[0] // 90)


@pytest.mark.parametrize("model", [Centred(), ManyOrFew()])
def test_a_model_whose_rows_see_each_other_is_refused(model: nn.Module, tmp_path: Path) -> None:
    """In a program for one row, the mean of all rows would be the row itself, and n a constant."""
    inputs = random_inputs(SIGNATURE, 1, {})
    program = exported(model, SIGNATURE, inputs, tmp_path / "program.pt2")
    why = why_dependent(load_program(program))
    assert why is not None
    with pytest.raises(EngineError) as refused:
        engine("lanes").compile(Portable(program, None), Target.parse("cpu"), {}, tmp_path)
    assert why in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "network.so").exists()
