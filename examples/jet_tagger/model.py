"""A small ParticleNet-like jet tagger: EdgeConv over a dynamic nearest-neighbour graph.

After Qu and Gouskos, arXiv:1902.08570, with two changes, so that every compiler gives the same
answer. First, a neighbour's weight falls to zero at the distance of the nearest particle that is
left out, so exchanging two equally distant particles changes nothing. With plain k nearest
neighbours, rounding would decide such ties, and engines round differently. Second, distances come
from differences of coordinates: |a|^2 + |b|^2 - 2ab loses digits for close particles.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class EdgeConv(nn.Module):
    """Messages of the nearest neighbours, summed with weights that fall to zero with distance."""

    def __init__(self, inputs: int, width: int, neighbours: int) -> None:
        super().__init__()
        self.neighbours = neighbours
        # The squared distance of absent particles, far above that of real ones. It is an attribute,
        # because TorchScript does not see module-level constants.
        self.far = 1.0e6
        # A linear layer on (x_i, x_j - x_i), written as two layers on particles: fewer operations
        # than a layer on every edge.
        self.centre = nn.Linear(inputs, width)
        self.neighbour = nn.Linear(inputs, width, bias=False)
        self.edge = nn.Linear(width, width)
        self.shortcut = nn.Linear(inputs, width)

    def forward(self, coordinates: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        """(n, P, D), (n, P, C), (n, P) bool -> (n, P, width), zero where the mask is False."""
        k = self.neighbours
        delta = coordinates.unsqueeze(2) - coordinates.unsqueeze(1)
        distance = torch.where(mask.unsqueeze(1), delta.square().sum(dim=3), self.far)
        nearest, index = torch.topk(distance, k + 1, dim=2, largest=False)
        # Each particle is its own first neighbour. If there are fewer than k particles, the absent
        # ones at `far` are among the neighbours; `far` is then also the limit, so they have weight
        # zero.
        limit = nearest[:, :, k:]
        weight = (limit - nearest[:, :, :k]) / (limit + 1.0e-6)

        messages = self.neighbour(features)
        width = messages.shape[2]
        flat = index[:, :, :k].reshape(-1, mask.shape[1] * k, 1).expand(-1, -1, width)
        gathered = torch.gather(messages, 1, flat).reshape(-1, mask.shape[1], k, width)
        edges = torch.relu(self.edge(torch.relu(self.centre(features).unsqueeze(2) + gathered)))
        total = (edges * weight.unsqueeze(3)).sum(dim=2) / k
        return torch.relu(total + self.shortcut(features)) * mask.unsqueeze(2)


class JetTagger(nn.Module):
    """Probabilities of `classes` jet types from a jet's leading particles and the jet itself."""

    def __init__(
        self, neighbours: int = 6, widths: tuple[int, int] = (24, 32), classes: int = 3
    ) -> None:
        super().__init__()
        first, second = widths
        self.layer1 = EdgeConv(6, first, neighbours)
        self.space = nn.Linear(first, 4)
        self.layer2 = EdgeConv(first, second, neighbours)
        self.head = nn.Sequential(
            nn.Linear(2 * second + 4, 2 * second), nn.ReLU(), nn.Linear(2 * second, classes)
        )

    def logits(self, particles: Tensor, jet: Tensor) -> Tensor:
        """(n, 4, P), (n, 3) -> (n, classes)."""
        pt = particles[:, 0]
        # Also False for NaN. The other columns of absent particles must have no effect.
        mask = pt > 0
        log_pt = torch.log(torch.where(mask, pt, 1.0))
        log_energy = torch.log(torch.where(mask, particles[:, 1], 1.0))
        deta = torch.where(mask, particles[:, 2], 0.0)
        dphi = torch.where(mask, particles[:, 3], 0.0)
        log_jet_pt = torch.log(jet[:, 0].clamp(min=1.0e-3))
        log_mass = torch.log(jet[:, 2].clamp(min=1.0e-3))

        points = torch.stack([deta, dphi], dim=2) * 4.0
        features = torch.stack(
            [
                (log_pt - 2.0) * 0.7,
                (log_energy - 2.5) * 0.7,
                (log_pt - log_jet_pt.unsqueeze(1) + 4.0) * 0.7,
                (torch.sqrt(deta * deta + dphi * dphi) - 0.2) * 4.0,
                deta * 4.0,
                dphi * 4.0,
            ],
            dim=2,
        ) * mask.unsqueeze(2)

        hidden = self.layer1(points, features, mask)
        hidden = self.layer2(self.space(hidden), hidden, mask)
        count = mask.sum(dim=1, keepdim=True).to(hidden.dtype)
        mean = hidden.sum(dim=1) / count.clamp(min=1.0)
        summary = torch.stack(
            [
                (log_jet_pt - 6.0) * 2.0,
                jet[:, 1] * 0.7,
                log_mass - 4.5,
                (count.squeeze(1) - 14.0) * 0.3,
            ],
            dim=1,
        )
        # hidden >= 0 and zero for absent particles, so the maximum needs no mask.
        logits: Tensor = self.head(torch.cat([mean, hidden.amax(dim=1), summary], dim=1))
        return logits

    def forward(self, particles: Tensor, jet: Tensor) -> tuple[Tensor, Tensor]:
        """Classify n jets.

        particles: (n, 4, P) float32: pt, energy (GeV), deta, dphi; absent particles have pt = 0.
        jet: (n, 3) float32: pt, eta, mass.
        Returns probabilities (n, classes) float32 and the most probable class, (n,) int32.
        """
        probabilities = torch.softmax(self.logits(particles, jet), dim=1)
        return probabilities, probabilities.argmax(dim=1).to(torch.int32)


def build(neighbours: int = 6, widths: tuple[int, int] = (24, 32), classes: int = 3) -> nn.Module:
    """The untrained model; by default, its keys are those of weights.safetensors."""
    return JetTagger(neighbours=neighbours, widths=widths, classes=classes)
