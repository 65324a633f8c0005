"""The Particle Transformer (Qu, Li and Qian, arXiv:2202.03772), for inference.

Particles attend to each other with a bias from the features of each pair; then a class token
attends to the particles. The parameters have the same names as in weaver-core 0.4.17
(`weaver.nn.model.ParticleTransformer:ParticleTransformer` with its default options), so weights
trained there can be loaded unchanged. Dropout is left out, because inference does not use it.

Three things differ from weaver-core. First, a pair is computed once for (i, j) and (j, i), and
looked up by an index instead of written into a matrix. Second, differences between four-vectors are
computed in double precision: for collinear particles, E^2 - p^2 and the angle would consist of
rounding errors in single precision, which their logarithm magnifies, so compilers would disagree.
Third, the output for a jet without particles is finite; weaver-core gives NaN. Other outputs agree
within rounding.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

EPS = 1.0e-8


def pair_features(vectors: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """ln kT, ln z, ln dR and ln m^2 of pairs: (n, 4, P), (T,), (T,) -> (n, T, 4).

    vectors: px, py, pz, E. `first` and `second`: the indices of the particles in each pair.
    """
    px, py, pz, energy = vectors.double().unbind(1)
    pt = torch.sqrt(px * px + py * py)
    rapidity = 0.5 * torch.log(1.0 + 2.0 * pz / (energy - pz).clamp(min=1.0e-20))
    particle = torch.stack([pt, rapidity, torch.atan2(py, px), px, py, pz, energy], dim=1)
    a, b = particle.index_select(2, first), particle.index_select(2, second)
    dphi = torch.remainder(a[:, 2] - b[:, 2] + math.pi, 2.0 * math.pi) - math.pi
    distance = torch.sqrt((a[:, 1] - b[:, 1]).square() + dphi.square())
    softer = torch.minimum(a[:, 0], b[:, 0])
    total = a[:, 3:] + b[:, 3:]
    mass2 = total[:, 3].square() - total[:, :3].square().sum(dim=1)
    share = softer / (a[:, 0] + b[:, 0]).clamp(min=EPS)
    features = torch.stack([softer * distance, share, distance, mass2], dim=2)
    return torch.log(features.clamp(min=EPS).to(vectors.dtype))


class Embed(nn.Module):
    """(n, C, P) -> (n, P, width)."""

    def __init__(self, inputs: int, widths: list[int]) -> None:
        super().__init__()
        self.input_bn = nn.BatchNorm1d(inputs)
        layers: list[nn.Module] = []
        for before, width in zip([inputs, *widths[:-1]], widths, strict=True):
            layers += [nn.LayerNorm(before), nn.Linear(before, width), nn.GELU()]
        self.embed = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        embedded: Tensor = self.embed(self.input_bn(features).transpose(1, 2))
        return embedded


class PairEmbed(nn.Module):
    """The attention's bias for each pair and head: (n, 4, P) four-vectors -> (n, H, P, P)."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.BatchNorm1d(4)]
        for before, width in zip([4, *widths[:-1]], widths, strict=True):
            layers += [nn.Conv1d(before, width, 1), nn.BatchNorm1d(width), nn.GELU()]
        self.embed = nn.Sequential(*layers[:-1])

    def forward(self, vectors: Tensor) -> Tensor:
        particles = vectors.shape[2]
        first, second = torch.tril_indices(particles, particles, device=vectors.device).unbind(0)
        pairs = self.embed(pair_features(vectors, first, second).transpose(1, 2))
        number = torch.arange(particles, device=vectors.device)
        high = torch.maximum(number.unsqueeze(0), number.unsqueeze(1))
        low = torch.minimum(number.unsqueeze(0), number.unsqueeze(1))
        place = high * (high + 1) // 2 + low  # index of pair (high, low) in the lower triangle
        found = pairs.index_select(2, place.flatten())
        square: Tensor = found.unflatten(2, (particles, particles))
        return square


class Attention(nn.Module):
    """Multi-head attention with the parameters of nn.MultiheadAttention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, queries: Tensor, keys: Tensor, absent: Tensor, bias: Tensor | None) -> Tensor:
        """(n, Q, W), (n, K, W), (n, 1, 1, K) bool, (n, H, Q, K) -> (n, Q, H, W / H)."""
        width = keys.shape[2]
        weight, offset = self.in_proj_weight, self.in_proj_bias
        split = (self.heads, width // self.heads)
        query = nn.functional.linear(queries, weight[:width], offset[:width])
        both = nn.functional.linear(keys, weight[width:], offset[width:])
        key, value = both.chunk(2, dim=2)
        query = query.unflatten(2, split).transpose(1, 2) / math.sqrt(split[1])
        key = key.unflatten(2, split).transpose(1, 2)
        value = value.unflatten(2, split).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(2, 3))
        if bias is not None:
            scores = scores + bias
        # A finite value: without particles, softmax then gives equal weights instead of NaN.
        scores = scores.masked_fill(absent, -1.0e30)
        attended = torch.matmul(torch.softmax(scores, dim=3), value)
        heads: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2)).unflatten(2, split)
        return heads


class Block(nn.Module):
    """Attention and a feed-forward layer, both normalised before and after, with learned scales."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.pre_attn_norm = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.post_attn_norm = nn.LayerNorm(width)
        self.pre_fc_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.post_fc_norm = nn.LayerNorm(4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.c_attn = nn.Parameter(torch.ones(heads))
        self.w_resid = nn.Parameter(torch.ones(width))

    def forward(
        self, queries: Tensor, context: Tensor | None, absent: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Update `queries`, (n, Q, W): the particles, or a class token with `context` (n, P, W).

        absent: (n, 1, 1, K) bool; bias: (n, H, Q, K). K = Q + P with a context, else Q.
        """
        if context is None:
            keys = attending = self.pre_attn_norm(queries)
        else:
            keys, attending = self.pre_attn_norm(torch.cat([queries, context], dim=1)), queries
        attended = self.attn(attending, keys, absent, bias) * self.c_attn.unsqueeze(1)
        # From here on, the values of the heads are interleaved, as in weaver-core.
        middle = self.post_attn_norm(attended.transpose(2, 3).flatten(2)) + queries
        wide = self.post_fc_norm(self.act(self.fc1(self.pre_fc_norm(middle))))
        updated: Tensor = self.fc2(wide) + self.w_resid * middle
        return updated


class ParticleTransformer(nn.Module):
    """`layers` blocks of particles, then `class_layers` blocks of a class token. `widths`: of the
    layers that embed a particle; `pair_widths`: of those that embed a pair, but the last."""

    def __init__(
        self,
        features: int,
        classes: int,
        widths: list[int],
        pair_widths: list[int],
        heads: int,
        layers: int,
        class_layers: int,
    ) -> None:
        super().__init__()
        width = widths[-1]
        self.embed = Embed(features, widths)
        self.pair_embed = PairEmbed([*pair_widths, heads])
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.cls_blocks = nn.ModuleList([Block(width, heads) for _ in range(class_layers)])
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Sequential(nn.Linear(width, classes))
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))

    def logits(self, features: Tensor, vectors: Tensor, exists: Tensor) -> Tensor:
        """(n, C, P), (n, 4, P), (n, P) bool -> (n, classes)."""
        mask = exists.unsqueeze(1)
        particles = self.embed(torch.where(mask, features, 0.0))
        particles = torch.where(exists.unsqueeze(2), particles, 0.0)
        bias = self.pair_embed(torch.where(mask, vectors, 0.0))
        absent = ~exists.unsqueeze(1).unsqueeze(1)
        for block in self.blocks:
            particles = block(particles, None, absent, bias)
        token = self.cls_token.expand(particles.shape[0], -1, -1)
        absent = nn.functional.pad(absent, [1, 0])
        for block in self.cls_blocks:
            token = block(token, particles, absent, None)
        scores: Tensor = self.fc(self.norm(token).squeeze(1))
        return scores

    def forward(self, features: Tensor, vectors: Tensor, exists: Tensor) -> Tensor:
        """Probabilities of n jets, (n, classes) float32.

        features: (n, C, P) float32, standardised; vectors: (n, 4, P) float32: px, py, pz, E, in
        GeV; exists: (n, P) bool. The values of absent particles have no effect.
        """
        return torch.softmax(self.logits(features, vectors, exists), dim=1)


def particle_transformer(
    features: int = 7,
    classes: int = 10,
    widths: tuple[int, ...] = (32, 64, 32),
    pair_widths: tuple[int, ...] = (16, 16),
    heads: int = 4,
    layers: int = 2,
    class_layers: int = 1,
) -> nn.Module:
    """The model with random weights from a fixed seed. In the paper: widths 128, 512, 128; pair
    widths 64, 64, 64; 8 heads, 8 layers, 2 class layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return ParticleTransformer(
            features, classes, list(widths), list(pair_widths), heads, layers, class_layers
        )


def reference(rows: dict[str, int], seed: int) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Inputs of `configs/zoo/particle_transformer.yaml`: jets of 0 to 16 massless particles.

    The particles are as collinear as in real jets: their angles to the axis are 10^-4 to 1. Absent
    particles have zeros.
    """
    rng = np.random.default_rng(seed)
    n, particles = rows["n"], 16
    exists = np.arange(particles) < rng.integers(0, particles + 1, (n, 1))
    jet_eta, jet_phi = rng.uniform(-2.0, 2.0, (n, 1)), rng.uniform(-np.pi, np.pi, (n, 1))
    angle = 10.0 ** rng.uniform(-4.0, 0.0, (n, particles))
    turn = rng.uniform(-np.pi, np.pi, (n, particles))
    deta, dphi = angle * np.cos(turn), angle * np.sin(turn)
    pt = -np.sort(-(10.0 ** rng.uniform(-0.5, 2.5, (n, particles))), axis=1)
    eta, phi = jet_eta + deta, jet_phi + dphi
    vectors = [pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(eta), pt * np.cosh(eta)]
    total = np.stack([np.where(exists, v, 0.0).sum(axis=1, keepdims=True) for v in vectors])
    jet_pt, jet_energy = np.hypot(total[0], total[1]) + 1e-9, total[3] + 1e-9
    features = {
        "log_pt": (np.log(pt) - 1.7) * 0.7,
        "log_energy": (np.log(vectors[3]) - 2.0) * 0.7,
        "log_pt_share": (np.log(pt / jet_pt) + 4.7) * 0.7,
        "log_energy_share": (np.log(vectors[3] / jet_energy) + 4.7) * 0.7,
        "delta_r": (angle - 0.2) * 4.0,
        "deta": deta,
        "dphi": dphi,
    }
    columns = {name: np.clip(values, -5.0, 5.0) for name, values in features.items()}
    columns |= dict(zip(("px", "py", "pz", "energy"), vectors, strict=True))
    jets = {name: np.where(exists, v, 0.0).astype(np.float32) for name, v in columns.items()}
    return {"jets": {**jets, "exists": exists}}
