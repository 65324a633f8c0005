"""What the plan of a program says, whatever it is compiled to."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from torch import nn

from engines import NotApplicableError
from engines.lanes.__main__ import main
from engines.lanes.index import constant
from engines.lanes.planning.plan import Plan, make_plan
from engines.lanes.planning.source_file import Width, write_kernel, write_source
from engines.lanes.planning.together import rows_together
from engines.lanes.tensor_builder import Builder
from engines.lanes.tensors import UNKNOWN, Argument, Program
from engines.lanes.values import Tensor
from tests.engines.lanes.harness import MOST, Function, compiled_row, program_of


class Everything(nn.Module):
    """Products, sums, sorting, parts and picks: all kinds of steps, and sums inside other loops."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        hidden = torch.relu(self.first(x)) + x.sum(1, keepdim=True)
        seen = torch.softmax(hidden, -1) * hidden.mean(1, keepdim=True)
        places = x.sort(1).indices
        picked = torch.cat([seen.gather(1, places), x.cumsum(1)], 1)
        return (self.last(picked) + x.amax(1, keepdim=True),)


def test_planning_twice_gives_the_same_plan() -> None:
    program = program_of(Everything(), [torch.randn(MOST, 6)])
    first, second = make_plan(program), make_plan(program)
    assert first.steps == second.steps
    assert first.elements.stored == second.elements.stored
    assert first.places == second.places
    assert first.size == second.size


def test_the_code_of_a_program_is_the_same_each_time() -> None:
    program = program_of(Everything(), [torch.randn(MOST, 6)])
    first, second = make_plan(program), make_plan(program)
    widths = [Width("many", 8, 4, 16), Width("one", 8, 1, 16)]
    assert (
        write_source(first, widths) == write_source(second, widths) == write_source(first, widths)
    )
    assert write_kernel(first, 128, "local") == write_kernel(second, 128, "local")


@cache
def plan_of(layer: nn.Module, *shape: int) -> Plan:
    """The plan of a layer between functions, for rows of this shape."""
    network = Function({"y": lambda x: torch.relu(layer(x.exp())).softmax(1)})
    return make_plan(program_of(network, [torch.randn(MOST, *shape)]))


WIDE = nn.Linear(8, 256)


@pytest.mark.parametrize(
    ("layer", "shape", "room", "rows"),
    [
        (WIDE, (8,), 48 << 10, 16),  # each weight serves 16 rows
        (nn.Conv1d(8, 64, 1), (8, 40), 48 << 10, 1),  # and here 40 positions of one row
        (WIDE, (8,), 10 << 10, 4),  # there is no room for more
        (WIDE, (8,), 100, 0),
    ],
)
def test_a_block_computes_as_many_rows_as_its_threads_need(
    layer: nn.Module, shape: tuple[int, ...], room: int, rows: int
) -> None:
    assert rows_together(plan_of(layer, *shape), 128, room) == rows


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.bool, [4]), (torch.float16, [4]), (torch.float32, [])],
)
def test_a_narrow_number_that_many_elements_read_is_converted_once(
    dtype: torch.dtype, stored: list[int]
) -> None:
    def masked(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        of_eight = weight.unsqueeze(2)  # each weight is read for 8 elements
        return (torch.where(of_eight, x, 0.0) if dtype == torch.bool else x * of_eight).sum(1)

    rows = [torch.randn(MOST, 4, 8), torch.ones(MOST, 4, dtype=dtype)]
    plan = make_plan(program_of(Function({"y": masked}), rows))
    assert [tensor.count for tensor in plan.places] == stored


def chain(functions: int, items: bool = False) -> Program:
    """A program that applies functions, and as many views, to 4 columns one after the other.

    Every third function is tanh; the others add the columns. Each view turns the order around."""
    build = Builder()
    length = UNKNOWN if items else 1
    x = build.add(Argument(build.values, (length, 4), "float32", 0, "c", 0 if items else None))
    last: Tensor = x
    for k in range(functions):
        if k % 3 == 0:
            last = build.map("tanh", [last], x.shape, "float32")
        else:
            last = build.map("add", [last, x], x.shape, "float32")
        last = build.view(last, x.shape, lambda index: (index[0], index[1] * -1 + 3))
    into = build.add(Argument(build.values, (1, 4), "float32", 4, "c", None))
    first = build.view(last, (1, 4), lambda index: (constant(0), index[1]))
    build.program.kinds, build.program.dtypes = "cc", ["float32", "float32"]
    build.program.outputs.append((into, first))
    return build.program


def test_a_chain_of_5000_functions_is_cut_into_short_steps() -> None:
    """A step computes at most 100 functions, so that no line of the code is long."""
    plan = make_plan(chain(5000))
    assert len(plan.steps) == 5000 // 100 + 1  # and one writes the output
    source = write_source(plan, [Width("one", 8, 1, 16)]).text
    assert source.count("tanh(") == len(range(0, 5000, 3))  # each function once
    assert max(map(len, source.splitlines())) < 200


def test_a_short_chain_of_functions_of_items_is_planned() -> None:
    assert make_plan(chain(90, items=True)).steps


def test_a_long_chain_of_functions_of_items_is_refused() -> None:
    """It would need memory for as many numbers as a row has items, which no plan knows."""
    program = chain(5000, items=True)
    with pytest.raises(NotApplicableError, match="items"):
        make_plan(program)


def test_a_stored_part_of_a_chain_gives_the_same_numbers() -> None:
    """130 functions are more than a step computes."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        y = x
        for k in range(130):
            y = y * 0.5 + x if k % 2 else y + 1.0
        return y

    x = torch.randn(MOST, 2)
    library = compiled_row(Function({"y": apply}), [x], ["y"])
    torch.testing.assert_close(library(x)["y"], library.eager(x)["y"], rtol=1e-6, atol=1e-6)


def test_the_command_shows_each_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["engines.lanes", "configs/zoo/mlp.yaml"])
    assert main() == 0
    output = capsys.readouterr().out
    _, graph, tensors, plan, code = re.split("^===.*===$", output, flags=re.MULTILINE)
    assert "torch.ops.aten" in graph
    assert re.search(r"x\d+ = product\(x\d+, x\d+\): float32\[1, 48\], not stored", tensors)
    assert re.search(r"for i1 < 48: .* with the sums of x\d+", plan)
    assert "weighted<" in code


def test_the_command_says_in_a_line_that_a_config_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["engines.lanes", "nowhere.yaml"])
    assert main() == 1
    assert capsys.readouterr().err.count("\n") == 1
