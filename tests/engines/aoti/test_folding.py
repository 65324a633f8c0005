"""A linear layer on the items of each row becomes one matrix product, also on separate columns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.export import ExportedProgram

from engines.aoti.folding import fold_linear
from engines.exported import load_program, quiet_torch
from soa import Block, Layout, RowRange, Signature, column
from stages.capture import convention_arguments
from stages.reference.answers import random_inputs
from tests.models.building import exported

aten = torch.ops.aten
_NAMES = tuple(f"x{i}" for i in range(80))


class Particles(nn.Module):
    """Two linear layers on the 5 features of 16 particles per row."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.mix = nn.Linear(5, 8, bias=bias), nn.Linear(8, 3, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mix(torch.relu(self.embed(x.view(-1, 16, 5))))
        return mixed.mean(1)


SIGNATURE = Signature.build(
    {
        "jets": Layout(tuple(column(name, "float32") for name in _NAMES)),
        "tags": Layout(tuple(column(name, "float32") for name in "abc")),
    },
    [Block("x", "jets", _NAMES)],
    [Block("y", "tags", tuple("abc"))],
    {"n": RowRange(0, 64)},
)


@pytest.fixture(scope="module", params=[True, False], ids=["bias", "no bias"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = random_inputs(SIGNATURE, 1, {})
    path = tmp_path_factory.mktemp("particles") / "program.pt2"
    return exported(Particles(request.param), SIGNATURE, inputs, path)


@pytest.fixture
def program(file: Path) -> ExportedProgram:
    """A program of its own for each test, since folding changes it."""
    return load_program(file)


def batched_with_weights(program: ExportedProgram) -> int:
    """The number of batched products with a weight, in the program as Inductor gets it."""
    with quiet_torch(), torch.no_grad():
        lowered = program.run_decompositions(select_decomp_table())
    return sum(
        node.target is aten.bmm.default and any(map(_is_weight, node.all_input_nodes))
        for node in lowered.graph.nodes
    )


def _is_weight(node: torch.fx.Node) -> bool:
    """Whether a node is a parameter, or a view of one."""
    while node.op != "placeholder":
        if not node.args or not isinstance(node.args[0], torch.fx.Node):
            return False
        node = node.args[0]
    return node.name.startswith("p_")


def test_no_product_repeats_a_weight_for_every_row(program: ExportedProgram) -> None:
    assert batched_with_weights(program) > 0  # torch alone makes some
    fold_linear(program)
    assert batched_with_weights(program) == 0


def test_folding_changes_no_answer(program: ExportedProgram) -> None:
    sizes, inputs = (0, 1, 2, 37), random_inputs(SIGNATURE, 2, {})

    def answers() -> list[object]:
        call = program.module()
        return [call(*convention_arguments(SIGNATURE, inputs, {"n": n})) for n in sizes]

    before = answers()
    fold_linear(program)
    torch.testing.assert_close(answers(), before)
