"""A jet-flavour tagger on NanoAOD branches: it standardises them, then has two small layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# The columns of the input, in this order; `configs/nanoaod.yaml` lists the same.
INPUTS = (
    "pt",
    "eta",
    "mass",
    "area",
    "chHEF",
    "neEmEF",
    "btagCSVV2",
    "qgl",
    "puIdDisc",
    "jetId",
    "nMuons",
    "nConstituents",
)


class FlavourTagger(nn.Module):
    """Probabilities of light, c and b; the features' mean and scale are among the weights."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        features = len(INPUTS) + 2
        # Parameters without training: TorchScript cannot read the annotations that buffers need.
        self.mean = nn.Parameter(torch.zeros(features), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(features), requires_grad=False)
        self.layers = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 3))

    def features(self, jets: Tensor) -> Tensor:
        """(n, 12) columns -> (n, 14): some as logarithms; for `btagCSVV2` and `qgl` also a flag, 1
        if the value is set (not below 0)."""
        pt, eta, mass, area, charged, photons, csv, qgl, pileup, jet_id, muons, size = torch.unbind(
            jets, dim=1
        )
        return torch.stack(
            [
                torch.log(pt.clamp(min=1.0)),
                eta.abs(),
                torch.log1p(mass.clamp(min=0.0)),  # some are -0.02
                area,
                charged,
                photons,
                csv.clamp(min=0.0),
                (csv >= 0).to(jets.dtype),
                qgl.clamp(min=0.0),
                (qgl >= 0).to(jets.dtype),
                pileup,
                jet_id,
                muons,
                torch.log1p(size),
            ],
            dim=1,
        )

    def logits(self, jets: Tensor) -> Tensor:
        """(n, 12) -> (n, 3), before the softmax."""
        result: Tensor = self.layers((self.features(jets) - self.mean) * self.scale)
        return result

    def forward(self, jets: Tensor) -> Tensor:
        """(n, 12) float32, the columns `INPUTS` -> (n, 3) probabilities of light, c, b."""
        return torch.softmax(self.logits(jets), dim=1)


def build(width: int = 12) -> nn.Module:
    """The untrained model; its keys are those of weights.safetensors."""
    return FlavourTagger(width)
