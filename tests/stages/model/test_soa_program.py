"""The calling convention, compared with eager on row-major tensors: random layouts and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from engines import Executable
from runtime.checked.poison import make_poisoned, same_bytes, wrote_outside
from runtime.session.session import Session
from soa import Block, Layout, RowRange, Signature, column
from soa.memory import read_block
from stages.errors import CaptureError
from stages.model.fronts.arranged import Arrangement, Order
from stages.model.soa_program import SoaProgram, TracedProgram, outputs_in_order
from tests.models.building import signature_of
from tests.models.signatures import Problem, problems


class Eager(Executable):
    """The uncompiled module of the calling convention, as an executable."""

    def __init__(self, problem: Problem) -> None:
        self.module = SoaProgram(problem.model, problem.signature)

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            self.module(*arguments)


@settings(max_examples=settings().max_examples * 3 // 2)
@given(problems())
def test_random_blocks_equal_row_major_eager(problem: Problem) -> None:
    """Bit by bit. Inputs stay as they were, and nothing is written outside the output rows."""
    signature, n = problem.signature, problem.n
    session = Session(signature, Eager(problem))
    inputs = {}
    for name in signature.input_collections:
        inputs[name] = make_poisoned(signature.layouts[name], n, n + problem.spare, 0xFF)
        for member in signature.layouts[name].columns:
            inputs[name].fill(member.name, problem.inputs[name][member.name])
    copies = {name: collection.to(collection.device) for name, collection in inputs.items()}
    out = make_poisoned(signature.layouts["out"], n, n + problem.spare, 0xFF)
    before = out.to(out.device)
    session.run(inputs, {"out": out})
    for bound, expected in zip(signature.outputs, problem.expected(), strict=True):
        answers = read_block(bound, out)
        assert torch.equal(answers, expected.to(answers.dtype)), bound.block
    assert all(same_bytes(copies[name], inputs[name]) for name in inputs)
    assert not wrote_outside(signature, "out", before, out)


class TimesTen(torch.nn.Module):
    """Ten times its input, which it keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.clone()
        return x * 10


def test_features_come_in_the_blocks_order() -> None:
    """Columns a, b, c hold 1, 2, 3; the block asks for c, a, b."""
    layout = Layout([column(name, "float32") for name in "abc"])
    signature = Signature.build(
        {"i": layout, "o": Layout([column(name, "float32") for name in "xyz"])},
        [Block("features", "i", ("c", "a", "b"))],
        [Block("answers", "o", ("z", "x", "y"))],
        {"n": RowRange(0, 10)},
    )
    model = TimesTen()
    program = SoaProgram(model, signature)
    matrix = torch.tensor([[1.0, 1.5], [2.0, 2.5], [3.0, 3.5]])
    out = torch.zeros(3, 4)
    assert program(torch.empty(2, 0), matrix, out) == ()
    assert torch.equal(model.seen, torch.tensor([[3.0, 1.0, 2.0], [3.5, 1.5, 2.5]]))
    # z gets the first feature (c), x the second (a), y the third (b); buffer order is x, y, z.
    assert torch.equal(out[:, :2], matrix * 10)
    assert not out[:, 2:].any()
    assert torch.equal(TracedProgram(program)(torch.empty(2, 0), matrix, out), torch.empty(2, 0))


TWO = signature_of({"features": "a"}, {"first": "x", "second": "y"})
X, Y = torch.zeros(2), torch.ones(2)


@pytest.mark.parametrize("result", [(X, Y), [X, Y], {"second": Y, "first": X}])
def test_a_model_returns_a_tuple_a_list_or_a_dict(result: Any) -> None:
    assert outputs_in_order(result, TWO) == [X, Y]


def test_a_key_of_an_output_that_is_no_name_is_known_by_its_name_in_the_config() -> None:
    odd = signature_of({"features": "a"}, {"_0": "x", "b_b": "y"})
    assert outputs_in_order({"b b": Y, "0": X}, odd) == [X, Y]


def test_a_key_of_an_input_that_is_no_name_is_known_by_its_name_in_the_config() -> None:
    class Reads(torch.nn.Module):
        def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            return inputs["p t"]

    arrangement = Arrangement((Order(),), (Order(),), "dict", ("p_t",))
    assert arrangement.call(Reads(), [X]) is X


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (X, "the model returns 1 outputs, the config declares 2: first, second"),
        ((X, Y, X), "the model returns 3 outputs, the config declares 2: first, second"),
        ((X, 1.0), "output 'second' is a float, not a tensor"),
        ((X, None), "output 'second' is a NoneType, not a tensor"),
        ({"first": X}, r"returns outputs \['first'\], the config declares \['first', 'second'\]"),
        ({"first": X, "second": Y, "sec ond": X}, "the config declares"),
        (None, "the model returns 1 outputs"),
    ],
)
def test_other_results_are_refused(result: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        outputs_in_order(result, TWO)
