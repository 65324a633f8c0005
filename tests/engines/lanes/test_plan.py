"""What the plan of a program says, whatever it is compiled to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engines.lanes.plan import planned
from engines.lanes.program import row_program
from engines.lanes.source_file import Width, written, written_kernel
from tests.engines.lanes.harness import MOST, prepared


class Everything(nn.Module):
    """Products, sums, sorting, parts and picks: all kinds of steps, and sums inside other loops."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        hidden = torch.relu(self.first(x)) + x.sum(1, keepdim=True)
        seen = torch.softmax(hidden, -1) * hidden.mean(1, keepdim=True)
        places = x.sort(1).indices
        picked = torch.cat([seen.gather(1, places), x.cumsum(1)], 1)
        return (self.last(picked) + x.amax(1, keepdim=True),)


def test_planning_twice_gives_the_same_plan() -> None:
    program = row_program(prepared(Everything(), [torch.randn(MOST, 6)], ["y"]).program)
    one, other = planned(program), planned(program)
    assert one.steps == other.steps
    assert one.elements.stored == other.elements.stored
    assert one.places == other.places
    assert one.size == other.size
    widths = [Width("many", 8, 4, 16), Width("one", 8, 1, 16)]
    assert written(one, widths) == written(other, widths) == written(one, widths)
    assert written_kernel(one, 128, "local") == written_kernel(other, 128, "local")
