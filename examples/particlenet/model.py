"""The real ParticleNet, trained on JetClass (Qu, Li and Qian, arXiv:2202.03772), on raw columns.

The network itself is that of weaver-core. This file has only the preparation of its inputs, which
the training did outside the network (`JetClass_kin.yaml` of jet-universe/particle_transformer), and
the sizes of the layers for the trained weights. The network of weaver-core 0.4.17 writes into its
inputs. These are intermediate tensors here, so the columns do not change.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

CLASSES = ("QCD", "Hbb", "Hcc", "Hgg", "H4q", "Hqql", "Zqq", "Wqq", "Tbqq", "Tbl")
PARTICLES = 128


class ParticleNetOnColumns(nn.Module):
    """The standardisation of the training, then weaver-core's ParticleNet as `mod`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.mod = network

    def prepare(self, particles: Tensor, jet: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The network's inputs: points (n, 2, P), features (n, 7, P), mask (n, 1, P) bool."""
        pt, energy = particles[:, 0], particles[:, 1]
        mask = pt > 0
        log_pt = torch.log(torch.where(mask, pt, 1.0))
        log_energy = torch.log(torch.where(mask, energy, 1.0))
        deta = torch.where(mask, particles[:, 2], 0.0)
        dphi = torch.where(mask, particles[:, 3], 0.0)
        features = torch.stack(
            [
                (log_pt - 1.7) * 0.7,
                (log_energy - 2.0) * 0.7,
                (log_pt - torch.log(jet[:, 0:1]) + 4.7) * 0.7,
                (log_energy - torch.log(jet[:, 1:2]) + 4.7) * 0.7,
                (torch.sqrt(deta * deta + dphi * dphi) - 0.2) * 4.0,
                deta,
                dphi,
            ],
            dim=1,
        ).clamp(-5.0, 5.0)
        exists = mask.unsqueeze(1)
        return torch.stack([deta, dphi], dim=1), torch.where(exists, features, 0.0), exists

    def forward(self, particles: Tensor, jet: Tensor) -> Tensor:
        """Probabilities of the ten `CLASSES`, (n, 10).

        particles: (n, 4, P) float32, P at least 17: pt, energy (GeV), deta, dphi relative to the
        jet axis; absent particles have pt = 0. jet: (n, 2) float32: pt, energy, both positive.
        """
        points, features, mask = self.prepare(particles, jet)
        probabilities: Tensor = self.mod(points, features, mask)
        return probabilities


def build() -> nn.Module:
    """The untrained network on raw columns; its keys are those of ParticleNet_kin.pt."""
    return ParticleNetOnColumns(network())


def network() -> nn.Module:
    """weaver-core's untrained network alone. Raises ImportError if weaver-core is missing.

    Takes points (n, 2, P), features (n, 7, P) and a mask (n, 1, P) of ones and zeros.
    """
    try:
        from weaver.nn.model.ParticleNet import ParticleNet
    except ImportError as error:
        raise ImportError(
            "examples/particlenet needs the network's own code, which cannot be imported "
            f"({error}). Install it: pip install --no-deps weaver-core==0.4.17"
        ) from error
    particle_net: nn.Module = ParticleNet(
        input_dims=7,
        num_classes=len(CLASSES),
        conv_params=[(16, (64, 64, 64)), (16, (128, 128, 128)), (16, (256, 256, 256))],
        fc_params=[(256, 0.1)],
        use_fusion=False,
        use_fts_bn=True,
        use_counts=True,
        for_inference=True,
    )
    return particle_net


def reference(rows: dict[str, int], seed: int) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Inputs of `configs/particlenet.yaml`: jets of ../jet_tagger/generate.py, 128 particles."""
    columns, _ = _generator().jets(rows["n"], seed, PARTICLES)
    wanted = ("pt", "energy", "part_pt", "part_energy", "part_deta", "part_dphi")
    return {"jets": {name: np.asarray(columns[name]) for name in wanted}}


def _generator() -> ModuleType:
    """The module jet_tagger/generate.py. It is loaded by its path, because the pipeline loads this
    file alone, with any working folder."""
    path = Path(__file__).resolve().parents[1] / "jet_tagger" / "generate.py"
    spec = importlib.util.spec_from_file_location("jet_tagger_generate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
