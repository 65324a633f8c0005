"""Parts of the campaigns on functions and random programs; a row alone gives the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines.kinds import host_cpu_levels
from tests.engines.lanes.harness import MOST, compiled
from tests.engines.lanes.programs import wrong
from tests.engines.lanes.ulps import measured


@pytest.mark.skipif("x86-64-v3" not in host_cpu_levels(), reason="it is built for x86-64-v3")
def test_functions_of_float32(tmp_path: Path) -> None:
    found = measured(tmp_path, 99_991)
    assert len(found) > 20
    assert {name: error for name, error in found.items() if not error.within(name)} == {}


def test_random_programs() -> None:
    assert [program.titles for program in wrong(range(6), steps=8)] == []


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
    library = compiled(Block(), [x], ["y"])
    together = library(x)["y"]
    for n in (1, 2, 3, 4, 5, 8, 9, 31, 33, 63):
        for first in (0, MOST - n):
            alone = library(x[first : first + n])["y"]
            assert torch.equal(alone, together[first : first + n]), (n, first)
