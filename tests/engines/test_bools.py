"""Any byte but 0 in a bool column counts as true in every engine, as in eager torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engines.aoti.build import AotiBuild
from engines.exported import load_program
from soa import Block, Layout, RowRange, Signature, column
from tests.models.building import ENGINES, Built, build

FLAGS = ("a", "b")
ANSWERS = {"same": "bool", "other": "bool", "number": "int64", "chosen": "float32"}
LAYOUT = [*(column(name, "bool") for name in FLAGS), column("x", "float32"), column("c", "bool")]
SIGNATURE = Signature.build(
    {
        "rows": Layout(LAYOUT),
        "answers": Layout([column(name, dtype) for name, dtype in ANSWERS.items()], 1, "columns"),
    },
    [
        Block("flags", "rows", FLAGS),  # a matrix
        Block("mixed", "rows", ("x", "c"), "float32"),  # columns
    ],
    [Block(name, "answers", (name,)) for name in ANSWERS],
    {"n": RowRange(0, 100)},
)
BYTES = torch.tensor([0, 1, 2, 255, 128, 3, 0], dtype=torch.uint8)


class Flags(nn.Module):
    def forward(self, flags: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        a, b, x, c = flags[:, 0], flags[:, 1], mixed[:, 0], mixed[:, 1]
        number = 2 * a.to(torch.int64) + b.to(torch.int64)
        return a, a.logical_not() & b, number, torch.where(b, x, -x) + 10 * c


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(Flags(), SIGNATURE, tmp_path_factory.mktemp("bools"))


def test_no_compiler_is_told_that_a_column_is_bool(built: Built) -> None:
    """A compiler would assume bytes of 0 or 1; on some processors others give wrong answers."""
    program = load_program(built.capture.program)
    outputs = {str(spec.target) for spec in program.graph_signature.output_specs}
    AotiBuild().rewrite(program)
    placeholders = program.graph.find_nodes(op="placeholder")
    inputs = [node.meta["val"] for node in placeholders if node.name not in outputs]
    assert inputs
    assert torch.bool not in {value.dtype for value in inputs}


def test_a_model_without_weights_has_an_empty_file_of_weights(built: Built) -> None:
    """The test below runs its library."""
    assert built.files["aoti"].with_name("weights.bin").read_bytes() == b""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("n", [4, 37])  # less and more than a vector register
def test_every_byte_but_0_is_true(built: Built, engine: str, n: int) -> None:
    session = built.session(engine)
    rows, answers = session.collection("rows", n), session.collection("answers", n)
    raw = {name: BYTES.roll(i).repeat(8)[:n] for i, name in enumerate((*FLAGS, "c"))}
    for name, values in raw.items():
        rows.tensor(name).view(torch.uint8).copy_(values)
    x = torch.arange(n) + 1.0
    rows.tensor("x").copy_(x)
    session.run(rows, answers)
    truth = {name: values != 0 for name, values in raw.items()}
    flags = torch.stack([truth[name] for name in FLAGS], dim=1)
    expected = Flags()(flags, torch.stack([x, truth["c"].float()], dim=1))
    for name, wanted in zip(ANSWERS, expected, strict=True):
        assert numbers(answers.tensor(name)) == numbers(wanted), name


def numbers(values: Tensor) -> list[float]:
    """The values of a column; of a bool column its bytes, since true must be written as 1."""
    plain = values.view(torch.uint8) if values.dtype == torch.bool else values
    return [float(value) for value in plain.tolist()]
