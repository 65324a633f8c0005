"""DeepSets (Zaheer et al., arXiv:1703.06114) on two sets of an event, its jets and its muons.

One network is applied to each jet and another one to each muon. The results of the objects that
exist are summed, and a last network reads both sums. The weights are random: the example shows how
to use a jagged file, and has no physics.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class EventSets(nn.Module):
    """Two probabilities of an event. `hidden`: the numbers that a network makes of each object."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.of_jets = nn.Sequential(nn.Conv1d(3, hidden, 1), nn.ReLU())
        self.of_muons = nn.Sequential(nn.Linear(4, hidden), nn.ReLU())
        self.together = nn.Sequential(
            nn.Linear(2 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)
        )

    def forward(self, jets: Tensor, jet_mask: Tensor, muons: Tensor, muon_exists: Tensor) -> Tensor:
        """Two scores of each of n events, (n, 2) float32.

        jets: (n, 3, P) float32; jet_mask: (n, 1, P) float32; muons: (n, Q, 4) float32;
        muon_exists: (n, Q) bool.
        """
        jet_sum = (self.of_jets(jets) * jet_mask).sum(dim=2)
        each = self.of_muons(muons / 50.0)
        muon_sum = torch.where(muon_exists.unsqueeze(2), each, 0.0).sum(dim=1)
        scores: Tensor = self.together(torch.cat([jet_sum, muon_sum], dim=1))
        return torch.softmax(scores, dim=1)


def build(hidden: int = 16) -> nn.Module:
    """The model with random weights from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return EventSets(hidden)
