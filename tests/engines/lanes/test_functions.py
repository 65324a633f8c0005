"""Parts of the campaigns on functions and random programs; a row alone gives the same bits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines.kinds import host_cpu_levels
from engines.lanes.functions import FUNCTIONS, call_text, carrier
from engines.lanes.planning.source_file import HEADERS
from tests.engines.lanes.harness import MOST, compiled_row
from tests.engines.lanes.programs import wrong_programs

_ON_CPU = """
#include "prelude.h"
#define LANES 8
#define RV 1
namespace lanes {
#include "lanes.h"
#include "functions.h"
"""
_ON_GPU = """
#include "device.h"
namespace lanes {
#include "scalars.h"
#include "functions.h"
"""


@pytest.mark.skipif("x86-64-v3" not in host_cpu_levels(), reason="it is built for x86-64-v3")
@pytest.mark.parametrize("headers", [_ON_CPU, _ON_GPU], ids=["cpu", "gpu"])
def test_the_headers_have_each_function_of_the_table(headers: str, tmp_path: Path) -> None:
    lines = []
    for name, function in FUNCTIONS.items():
        arguments = ["a", "b", "c"][: function.arguments]
        for kind in function.carriers:
            result = carrier(function.result) if function.result else kind
            parameters = ", ".join(f"{kind} {argument}" for argument in arguments)
            body = f"{{ return {call_text(name, arguments)}; }}"
            lines.append(f"{result} {name}_of_{kind}({parameters}) {body}")
        if function.of_bools:
            lines.append(
                f"I {name}_of_bools(I a, I b) {{ return {call_text(name, arguments, True)}; }}"
            )
    source = tmp_path / "functions.cpp"
    source.write_text("\n".join([headers, *lines, "}"]))
    flags = ("-fsyntax-only", "-std=c++20", "-march=x86-64-v3", "-w", f"-I{HEADERS}")
    done = subprocess.run(["g++", *flags, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("integers", [False, True], ids=["floats", "integers"])
def test_random_programs_have_the_answers_of_eager_torch(integers: bool) -> None:
    wrong = wrong_programs(range(6), steps=8, integers=integers)
    assert [program.titles for program in wrong] == []


class Block(nn.Module):
    """Products, sums, functions and sorting: their last bits could depend on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(5, 19), nn.Linear(19, 7)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        hidden = torch.tanh(self.first(x))
        seen = torch.softmax(hidden @ hidden.transpose(1, 2), -1) @ hidden
        return (self.last(seen).sort(1).values.mean(1).exp(),)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    torch.manual_seed(6)
    x = torch.randn(MOST, 6, 5)
    library = compiled_row(Block(), [x], ["y"])
    together = library(x)["y"]
    for n in (1, 2, 3, 4, 5, 8, 9, 31, 33, 63):
        for first in (0, MOST - n):
            alone = library(x[first : first + n])["y"]
            assert torch.equal(alone, together[first : first + n]), (n, first)
