"""One trunk and five heads with different dtypes: several quantities of one candidate.

The outputs are an energy correction, a vertex in double precision, a class, a decision and two
compact weights. The inputs have four dtypes; the model converts integers and flags to floats.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MultiHead(nn.Module):
    """A trunk of two layers of `hidden` numbers, and a linear head for each output."""

    def __init__(self, kinematics: int, counts: int, flags: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(kinematics + counts + flags + 3, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
        )
        self.energy = nn.Linear(hidden, 2)
        self.shift = nn.Linear(hidden, 3)
        self.classes = nn.Linear(hidden, classes)
        self.decision = nn.Linear(hidden, 1)
        self.weight = nn.Linear(hidden, 2)

    def scores(
        self, kinematics: Tensor, counts: Tensor, flags: Tensor, vertex: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The scores for the class, (n, classes), and for the decision, (n,)."""
        hidden = self.hidden(kinematics, counts, flags, vertex)
        return self.classes(hidden), self.decision(hidden).squeeze(1)

    def hidden(self, kinematics: Tensor, counts: Tensor, flags: Tensor, vertex: Tensor) -> Tensor:
        """What the trunk makes of the inputs, (n, hidden) float32."""
        dtype = kinematics.dtype
        features = [
            kinematics,
            torch.log1p(counts.to(dtype)) - 3.5,
            flags.to(dtype),
            vertex.to(dtype),
        ]
        hidden: Tensor = self.trunk(torch.cat(features, dim=1))
        return hidden

    def forward(
        self, kinematics: Tensor, counts: Tensor, flags: Tensor, vertex: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Compute all outputs for n candidates.

        kinematics: (n, F) float32; counts: (n, C) int32, not negative; flags: (n, B) bool;
        vertex: (n, 3) float64, in cm.
        Returns the energy and its resolution (n, 2) float32; the corrected vertex (n, 3) float64;
        the most probable class (n,) int64; the decision to keep the candidate (n,) bool; two
        weights (n, 2) float16.
        """
        hidden = self.hidden(kinematics, counts, flags, vertex)
        energy = nn.functional.softplus(self.energy(hidden))
        moved = vertex + 0.01 * torch.tanh(self.shift(hidden)).to(vertex.dtype)
        label = self.classes(hidden).argmax(dim=1)
        keep = self.decision(hidden).squeeze(1) > 0.0
        weight = torch.sigmoid(self.weight(hidden)).to(torch.float16)
        return energy, moved, label, keep, weight


def multi_head(
    kinematics: int = 4, counts: int = 2, flags: int = 2, hidden: int = 32, classes: int = 4
) -> nn.Module:
    """The model with random weights from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MultiHead(kinematics, counts, flags, hidden, classes)
