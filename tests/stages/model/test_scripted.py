"""TorchScript in every form that torch saves is captured, in operators that engines know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages.capture import capture
from stages.model import ModelSource, build_model
from stages.reference.answers import random_inputs
from tests.models.building import signature_of


class Network(nn.Module):
    """A loop over an argument with a default, a branch, and attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, steps: int = 2) -> Tensor:
        y = self.first(x.unsqueeze(2))
        for _ in range(steps):
            y, _ = self.attention(y, y, y)
            if self.training:
                y = self.dropout(y)
        scores: Tensor = self.last(y.mean(1))
        return scores


SIGNATURE = signature_of({"features": "a b c"}, {"scores": "x y"})


def as_torchscript(network: Network, form: str) -> Any:
    """The network as torch saves it; scripted in train mode, as users do."""
    if form == "scripted":
        return torch.jit.script(network.train())
    if form == "frozen":
        return torch.jit.freeze(torch.jit.script(network))
    with torch.no_grad():
        return torch.jit.trace(network, torch.randn(5, 3), check_trace=False)


@pytest.mark.parametrize(
    "form", ["scripted", pytest.param("frozen", marks=pytest.mark.long), "traced"]
)
def test_torchscript_of_any_form_is_captured(form: str, tmp_path: Path) -> None:
    """With the answers of the network. Attention has an operator of its own in a trace only."""
    network = Network().eval()
    as_torchscript(network, form).save(tmp_path / "net.pt")
    model = build_model(ModelSource(torchscript=tmp_path / "net.pt"))
    x = torch.randn(5, 3)
    with torch.no_grad():
        torch.testing.assert_close(model(x), network.eval()(x), rtol=1e-5, atol=1e-6)
    captured = capture(model, SIGNATURE, random_inputs(SIGNATURE, 1, {}), tmp_path)
    assert captured.torchscript == "scripted"
    program = torch.export.load(tmp_path / "program.pt2")
    fused = [node.name for node in program.graph.nodes if "multi_head" in str(node.target)]
    assert form == "traced" or not fused
