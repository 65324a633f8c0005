"""A model whose rows depend on each other gets no program for one row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines import EngineError, NotApplicableError, Portable, Target, engine
from engines.exported import load_program, row_rules
from engines.lanes import why_dependent
from engines.lanes.operators.registry import register_rule
from engines.target import host_runs
from runtime.session.session import Session
from soa import Block, Layout, RowRange, Signature, column
from stages.reference import random_inputs
from tests.engines.lanes.harness import MOST, compiled_row, prepared
from tests.models.building import exported, mlp_signature, reference_collections
from tests.models.mlps import PointwiseFirst

SIGNATURE = Signature.build(
    {"rows": Layout([column("x", "float32")]), "answers": Layout([column("y", "float32")])},
    [Block("x", "rows", ("x",))],
    [Block("y", "answers", ("y",))],
    {"n": RowRange(0, 100)},
)


def test_threads_that_share_the_rows_give_the_same_bits(tmp_path: Path) -> None:
    """The network is work enough for three threads; 33 and 4099 rows end with a part of a block."""
    signature = mlp_signature(highest=5000)
    inputs = random_inputs(signature, 1, {})
    program = exported(PointwiseFirst(hidden=512), signature, inputs, tmp_path / "program.pt2")
    files = engine("lanes").compile(Portable(program, None), Target.parse("cpu"), {}, tmp_path)

    def bits(threads: int, n: int) -> bytes:
        executable = engine("lanes").open(tmp_path / files[0], torch.device("cpu"), threads)
        rows, written = reference_collections(signature, inputs, {"n": n})
        binding = Session(signature, executable).bind(rows, written)
        for _ in range(3):  # threads may take other shares of the rows in each call
            binding()
        return written["tags"].memory()[0].numpy().tobytes()

    for n in (1, 33, 4099, 5000):
        assert bits(1, n) == bits(2, n) == bits(3, n)


class Products(nn.Module):
    """Products with `outputs` sums of `steps` steps, of a vector, of positions, and of a kernel."""

    def __init__(self, steps: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(steps * outputs)
        self.vector = nn.Linear(5 * steps, outputs, dtype=dtype)
        self.positions = nn.Linear(steps, outputs, dtype=dtype)
        self.kernel = nn.Conv1d(steps, outputs, 3, padding=1, dtype=dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        by_position = x.view(x.shape[0], 5, -1)
        of_kernel = self.kernel(by_position.transpose(1, 2)).flatten(1)
        of_positions = torch.tanh(self.positions(by_position)).flatten(1)
        return torch.relu(self.vector(x)), of_positions, of_kernel


FLOATS = (torch.float32, torch.float64)
LEVELS = ("x86-64-v3", "x86-64-v4")


@pytest.mark.parametrize(
    ("steps", "outputs", "level", "dtype"),
    [
        (17, 37, "x86-64-v2", torch.float32),  # where lanes are rows at any number of rows
        *((17, 37, level, dtype) for level in LEVELS for dtype in FLOATS),
        *((40, 64, level, torch.float32) for level in LEVELS),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for level in LEVELS
            for case in [
                (40, 64, level, torch.float64),
                *((16, 16, level, dtype) for dtype in FLOATS),
            ]
        ),
    ],
)
def test_few_rows_have_the_bits_of_many(
    steps: int, outputs: int, level: str, dtype: torch.dtype
) -> None:
    """Registers hold sums of one row there, if there are many; one row has code of its own."""
    target = Target("cpu", level)
    if not host_runs(target):
        pytest.skip(f"this processor does not run {level}")
    x = torch.randn(MOST, 5 * steps, dtype=dtype)
    x[2, ::3] = float("nan")
    model = Products(steps, outputs, dtype)
    library = compiled_row(model, [x], ["a", "b", "c"], target=target)
    whole = library(x)  # which also runs each row alone
    for n in (1, 2, 3, 4, 5, 9, 33):
        for first in (0, 1, 2, 30):
            answers = library.together(x[first : first + n])
            for name, values in answers.items():
                wanted = whole[name][first : first + n]
                assert values.numpy().tobytes() == wanted.numpy().tobytes(), (name, n, first)


class Centred(nn.Module):
    """Less the mean of all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class ManyOrFew(nn.Module):
    """Twice its input from 90 rows on."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + x.shape[0] // 90)


@pytest.mark.parametrize("model", [Centred(), ManyOrFew()], ids=lambda model: type(model).__name__)
def test_a_model_whose_rows_see_each_other_is_refused(model: nn.Module, tmp_path: Path) -> None:
    """In a program for one row, the mean of all rows would be the row itself, and n a constant."""
    inputs = random_inputs(SIGNATURE, 1, {})
    program = exported(model, SIGNATURE, inputs, tmp_path / "program.pt2")
    dependence = why_dependent(load_program(program))
    assert dependence is not None
    with pytest.raises(EngineError) as refused:
        engine("lanes").compile(Portable(program, None), Target.parse("cpu"), {}, tmp_path)
    assert dependence.text in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "network.so").exists()


@pytest.mark.parametrize("operator", ["sum", "arange", "tanh"])
def test_an_operator_has_one_rule_for_rows(operator: str) -> None:
    """These have a rule; another one is refused."""
    with pytest.raises(ValueError, match=operator):
        register_rule(row_rules.follow_along_dims, operator)


class Noisy(nn.Module):
    """Takes the number of rows as a plain number, so it is captured at one row."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x * len(x) + torch.rand(3),)


def test_random_numbers_do_not_become_constants() -> None:
    """Random numbers that no input reaches look like a weight."""
    program = prepared(Noisy(), [torch.randn(MOST, 3)], ["y"], row_wise=True)
    with pytest.raises(NotApplicableError, match="random"):
        program.compiled()
