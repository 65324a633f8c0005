"""What lanes is not for is said so: that nothing broke, a user learns from the type alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines import NotApplicableError, Portable, Target, engine
from tests.engines.lanes.harness import MOST, compiled


class Decomposed(nn.Module):
    """An operator that it has no code for."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.linalg.eigvalsh(x + x.mT),)


def test_a_model_that_it_has_no_code_for() -> None:
    with pytest.raises(NotApplicableError):
        compiled(Decomposed(), [torch.randn(MOST, 3, 3)], ["y"])


@pytest.mark.parametrize("target", ["cuda/sm_90", "rocm/gfx90a"])
def test_a_target_that_it_does_not_build_for(target: str, tmp_path: Path) -> None:
    source = Portable(tmp_path / "program.pt2", None)
    with pytest.raises(NotApplicableError):
        engine("lanes").compile(source, Target.parse(target), {}, tmp_path)
