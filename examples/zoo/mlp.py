"""A plain perceptron: standardised features, linear layers with ReLU, class probabilities.

Its first operation is pointwise. In that case compiled code gives wrong results without an error if
its input is a strided view of columns (tests/engines/test_strided_memory.py).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    """(n, F) float32 -> (n, classes) float32, probabilities."""

    def __init__(self, features: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(0.1 * torch.randn(features))
        self.scale = nn.Parameter(1.0 + 0.1 * torch.rand(features))
        widths = [features] + [hidden] * layers
        hidden_layers: list[nn.Module] = []
        for width, next_width in pairwise(widths):
            hidden_layers += [nn.Linear(width, next_width), nn.ReLU()]
        self.layers = nn.Sequential(*hidden_layers, nn.Linear(hidden, classes))

    def forward(self, features: Tensor) -> Tensor:
        return torch.softmax(self.layers((features - self.mean) * self.scale), dim=1)


def mlp(features: int = 6, hidden: int = 48, layers: int = 1, classes: int = 3) -> nn.Module:
    """The model with random weights from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Mlp(features, hidden, layers, classes)
