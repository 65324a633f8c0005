"""An artifact runs every row count of its range, also where torch's kernels depend on the count."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.models.building import build, mlp_signature, reasons


class Convolved(nn.Module):
    """Torch uses oneDNN for this convolution depending on whether there are 16 rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Conv2d(1, 4, 3, padding=1)
        self.outer = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.outer(self.inner(x.reshape(-1, 1, 2, 3)).flatten(1))
        return answer


def test_a_kernel_for_the_largest_row_count_is_not_used_for_all(tmp_path: Path) -> None:
    assert reasons(build(Convolved(), mlp_signature(16), tmp_path, ("aoti",))) == {"aoti": None}
