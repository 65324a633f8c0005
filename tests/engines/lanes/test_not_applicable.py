"""What lanes is not for is said so: that nothing broke, a user learns from the type alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engines import NotApplicableError
from tests.engines.lanes.harness import MOST, compiled


class Decomposed(nn.Module):
    """An operator that it has no code for."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.linalg.eigvalsh(x + x.mT),)


def test_a_model_that_it_has_no_code_for() -> None:
    with pytest.raises(NotApplicableError):
        compiled(Decomposed(), [torch.randn(MOST, 3, 3)], ["y"])
