"""Networks that are not in the zoo, for `python -m benchmarks.speed.zoo --unseen`.

Nothing was tuned on them. Each takes rows of plain columns; `write_configs` writes a config for
each.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

SHAPES = {
    "pointwise_first": (6, 3, 1_000_000),
    "transformer_block": (80, 3, 8192),
    "small_resnet": (192, 4, 8192),
    "edge_conv": (48, 3, 8192),
    "waveform": (64, 64, 10_000),
    "wide_tabular": (40, 1, 100_000),
    "coupling_flow": (8, 8, 100_000),
    "track_purity": (15, 1, 100_000),
    "line_segments": (30, 3, 1_000_000),
    "mlp_256": (20, 1, 100_000),
}
"""By network: its columns of features, its columns of answers, and the largest n."""

_CONFIG = """\
name: unseen-{dashed}
model:
  factory: {file}:network
  kwargs: {{name: {name}}}
collections:
  given:
    columns: [{given}]
  found:
    columns: [{found}]
inputs:
  - {{name: x, collection: given, columns: [{x}]}}
outputs:
  - {{name: y, collection: found, columns: [{y}]}}
rows:
  n: {{min: 0, max: {most}, typical: [1, 1000]}}
"""


def write_configs(folder: Path) -> list[Path]:
    """A config for each network, in `folder`."""
    paths = []
    for name, (features, outputs, most) in SHAPES.items():
        x, y = [f"x{i}" for i in range(features)], [f"y{i}" for i in range(outputs)]
        path = folder / f"{name}.yaml"
        path.write_text(
            _CONFIG.format(
                name=name,
                dashed=name.replace("_", "-"),
                file=Path(__file__).resolve(),
                given=", ".join(f"{{name: {c}, dtype: float32}}" for c in x),
                found=", ".join(f"{{name: {c}, dtype: float32}}" for c in y),
                x=", ".join(x),
                y=", ".join(y),
                most=most,
            )
        )
        paths.append(path)
    return paths


class _PointwiseFirst(nn.Module):
    """6 → 48 → 3; its first operation is pointwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 48), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.last(torch.relu(self.first(torch.log1p(x.abs())))), dim=-1)


class _TransformerBlock(nn.Module):
    """16 particles of 5 features, one block of width 32 with 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)
        self.classify = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.view(-1, 16, 5))
        q, k, v = self.qkv(self.first(h)).view(-1, 16, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        attended = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, dim=-1) @ v
        h = h + self.out(attended.transpose(1, 2).reshape(-1, 16, 32))
        h = h + self.narrow(torch.nn.functional.gelu(self.wide(self.second(h))))
        scores: Tensor = self.classify(h.mean(1))
        return scores


class _SmallResNet(nn.Module):
    """8 by 8 pixels of 3 colours."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 16, 3, padding=1),
                nn.BatchNorm2d(16),
            )
            for _ in range(2)
        )
        self.classify = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.view(-1, 3, 8, 8))
        for block in self.blocks:
            h = torch.relu(h + block(h))
        scores: Tensor = self.classify(h.mean((2, 3)))
        return scores


class _EdgeConv(nn.Module):
    """16 points of 3 features, each with its 4 nearest others."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.classify = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        points = x.view(-1, 16, 3)
        near = torch.cdist(points[..., :2], points[..., :2]).topk(5, largest=False).indices[..., 1:]
        index = near.reshape(-1, 64, 1).expand(-1, -1, 3)
        others = points.gather(1, index).view(-1, 16, 4, 3)
        own = points.unsqueeze(2).expand(-1, -1, 4, -1)
        edges = self.edge(torch.cat([own, others - own], -1))
        scores: Tensor = self.classify(edges.amax(2).mean(1))
        return scores


class _Waveform(nn.Module):
    """64 samples through a convolutional autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 8, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(8, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.ConvTranspose1d(16, 8, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose1d(8, 1, 4, stride=2, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        samples: Tensor = self.layers(x.unsqueeze(1))
        return samples.squeeze(1)


class _WideTabular(nn.Module):
    """40 → 256 → 256 → 1, with layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(40, 256), nn.LayerNorm(256), nn.SiLU(),
            nn.Linear(256, 256), nn.LayerNorm(256), nn.SiLU(),
            nn.Linear(256, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        score: Tensor = self.layers(x)
        return score


class _CouplingFlow(nn.Module):
    """Six affine coupling layers on 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            fixed, moved = x.chunk(2, dim=-1)
            scale, shift = layer(fixed).chunk(2, dim=-1)
            x = torch.cat([moved * torch.exp(torch.tanh(scale)) + shift, fixed], dim=-1)
        return x


class _TrackPurity(nn.Module):
    """54,000 weights, as in a trigger: layers with batch norm, then three residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (15, 32, 64, 128, 256)
        layers: list[nn.Module] = []
        for width, wider in pairwise(sizes):
            layers += [nn.Linear(width, wider), nn.BatchNorm1d(wider), nn.ELU()]
        self.wide, self.narrow = nn.Sequential(*layers), nn.Linear(256, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ELU()) for _ in range(3)
        )
        self.classify = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.narrow(self.wide(x))
        for block in self.blocks:
            h = h + block(h)
        return torch.sigmoid(self.classify(h))


class _LineSegments(nn.Module):
    """2,115 weights, as the networks that judge track candidates from line segments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.layers(x), dim=-1)


class _Mlp256(nn.Sequential):
    """20 → 256 → 256 → 256 → 1."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1),
        )  # fmt: skip


_NETWORKS: dict[str, type[nn.Module]] = {
    "pointwise_first": _PointwiseFirst,
    "transformer_block": _TransformerBlock,
    "small_resnet": _SmallResNet,
    "edge_conv": _EdgeConv,
    "waveform": _Waveform,
    "wide_tabular": _WideTabular,
    "coupling_flow": _CouplingFlow,
    "track_purity": _TrackPurity,
    "line_segments": _LineSegments,
    "mlp_256": _Mlp256,
}


def network(name: str) -> nn.Module:
    """The network of this name, always with the same weights."""
    torch.manual_seed(0)
    return _NETWORKS[name]().eval()
