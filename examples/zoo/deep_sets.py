"""DeepSets (Zaheer et al., arXiv:1703.06114) with a mask and one scalar, the pile-up.

The same network is applied to each hit, the results of the hits that exist are averaged, and a
second network reads the mean, the number of hits and the event's pile-up. The order of the hits,
and the values in places without a hit, have no effect.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DeepSets(nn.Module):
    """`features` of a hit, `hidden` numbers that a network makes of each, `outputs` of a shower."""

    def __init__(self, features: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.each = nn.Sequential(
            nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.together = nn.Sequential(
            nn.Linear(hidden + 2, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
        )

    def forward(self, hits: Tensor, exists: Tensor, pileup: Tensor) -> Tensor:
        """Regress `outputs` numbers of each of n showers, (n, outputs) float32.

        hits: (n, P, F) float32; exists: (n, P) bool; pileup: (1,) float32, one for all rows.
        """
        mask = exists.unsqueeze(2)
        hidden = self.each(torch.where(mask, hits, 0.0))
        count = exists.to(hits.dtype).sum(dim=1, keepdim=True)
        mean = torch.where(mask, hidden, 0.0).sum(dim=1) / count.clamp(min=1.0)
        event = (pileup / 50.0).expand(count.shape[0], 1)
        numbers: Tensor = self.together(torch.cat([mean, count / exists.shape[1], event], dim=1))
        return numbers


def deep_sets(features: int = 5, hidden: int = 32, outputs: int = 2) -> nn.Module:
    """The model with random weights from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return DeepSets(features, hidden, outputs)
