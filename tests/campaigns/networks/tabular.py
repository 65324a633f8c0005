"""Networks on plain columns, as people have them: taggers, tabular networks, densities."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# mypy: disable-error-code="no-any-return,no-untyped-call,no-untyped-def"


class Tagger(nn.Module):
    """Dense layers with batch norm and dropout, as a Keras tutorial has them."""

    def __init__(self, features: int = 16, classes: int = 5) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.BatchNorm1d(features)]
        width = features
        for size in (64, 32, 32):
            layers += [nn.Linear(width, size), nn.BatchNorm1d(size), nn.ReLU(), nn.Dropout(0.2)]
            width = size
        self.net = nn.Sequential(*layers, nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.net(x), dim=1)


def rtdl_resnet() -> nn.Module:
    """The ResNet of Gorishniy et al. 2021, from PyPI's rtdl_revisiting_models."""
    import rtdl_revisiting_models as rtdl

    return rtdl.ResNet(
        d_in=12, d_out=2, n_blocks=2, d_block=48, d_hidden=None, d_hidden_multiplier=2.0,
        dropout1=0.1, dropout2=0.0,
    )  # fmt: skip


def rtdl_transformer() -> nn.Module:
    """The FT-Transformer of Gorishniy et al. 2021, on numbers only."""
    import rtdl_revisiting_models as rtdl

    return NumbersOnly(
        rtdl.FTTransformer(
            n_cont_features=8,
            cat_cardinalities=[],
            d_out=1,
            n_blocks=1,
            d_block=32,
            attention_n_heads=4,
            attention_dropout=0.1,
            ffn_d_hidden=None,
            ffn_d_hidden_multiplier=4 / 3,
            ffn_dropout=0.1,
            residual_dropout=0.0,
        )
    )


class NumbersOnly(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, None)


def tabm() -> nn.Module:
    """TabM (Gorishniy et al. 2024), from PyPI's tabm: 8 predictions for each row."""
    from tabm import TabM

    net = TabM.make(n_num_features=10, d_out=1, k=8, n_blocks=2, d_block=32)
    return MeanOf(net)


class MeanOf(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).mean(1)


class WideAndDeep(nn.Module):
    """Embeddings of categories beside numbers (Cheng et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.station = nn.Embedding(12, 4)
        self.charge = nn.Embedding(3, 2)
        self.wide = nn.Linear(6, 1)
        self.deep = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor, station: Tensor, charge: Tensor) -> Tensor:
        all_of_it = torch.cat([x, self.station(station), self.charge(charge)], dim=-1)
        return torch.sigmoid(self.wide(x) + self.deep(all_of_it)).squeeze(-1)


class SoftTrees(nn.Module):
    """Differentiable oblivious trees (NODE, Popov et al. 2019), with sigmoids."""

    def __init__(self, features: int = 10, trees: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.select = nn.Parameter(torch.randn(trees, depth, features))
        self.cut = nn.Parameter(torch.randn(trees, depth))
        self.answer = nn.Parameter(torch.randn(trees, 2**depth))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.einsum("nf,tdf->ntd", x, self.select.softmax(-1))
        right = torch.sigmoid(4 * (chosen - self.cut))
        weights = torch.ones_like(right[..., :1])
        for level in range(right.shape[-1]):
            one = right[..., level : level + 1]
            weights = torch.cat([weights * one, weights * (1 - one)], dim=-1)
        return (weights * self.answer).sum((1, 2))


class Anomaly(nn.Module):
    """An autoencoder that returns what it makes of its input, and how far that is."""

    def __init__(self, features: int = 19) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 16), nn.ELU(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ELU(), nn.Linear(16, features))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.decoder(self.encoder(x))
        return made, ((made - x) ** 2).mean(dim=1)


class VariationalEncoder(nn.Module):
    """The encoder of a VAE, with the Kullback-Leibler distance as the trigger of CMS has it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, 32), nn.LeakyReLU(0.2))
        self.mean, self.spread = nn.Linear(32, 6), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        mean, log_variance = self.mean(hidden), self.spread(hidden).clamp(-8, 8)
        distance = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1)
        return {"mean": mean, "log_variance": log_variance, "score": distance}


class SelfNormalizing(nn.Sequential):
    """SELU and alpha dropout (Klambauer et al. 2017)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for width in (28, 40, 40, 40):
            layers += [nn.Linear(width, 40), nn.SELU(), nn.AlphaDropout(0.05)]
        super().__init__(*layers, nn.Linear(40, 1), nn.Sigmoid())


class Experts(nn.Module):
    """A gate and its experts (Jacobs et al. 1991), with the best two of six."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, which = torch.topk(self.gate(x), 2, dim=-1)
        gate = torch.zeros(x.shape[0], 6).scatter(1, which, weights.softmax(-1))
        answers = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (gate.unsqueeze(-1) * answers).sum(1)


class Conditional(nn.Module):
    """A network whose layers are scaled by a second input (FiLM, Perez et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 24), nn.Linear(24, 2)
        self.scales = nn.Linear(3, 48)

    def forward(self, features: Tensor, conditions: Tensor) -> Tensor:
        scale, shift = self.scales(conditions).chunk(2, dim=1)
        return self.last(F.silu(self.first(features) * (1 + scale) + shift))


class Field(nn.Module):
    """A field map with sines (SIREN, Sitzmann et al. 2020): position to three components."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 48), nn.Linear(48, 48)])
        self.out = nn.Linear(48, 3)

    def forward(self, position: Tensor) -> Tensor:
        for layer in self.layers:
            position = torch.sin(10.0 * layer(position))
        return self.out(position)


class Splines(nn.Module):
    """Kolmogorov-Arnold layers with B-splines of third order, as efficient-kan writes them."""

    def __init__(self, sizes: tuple[int, ...] = (5, 8, 1), grid: int = 5, order: int = 3) -> None:
        super().__init__()
        self.order = order
        self.knots: Tensor
        knots = torch.arange(-order, grid + order + 1) * (2 / grid) - 1
        self.register_buffer("knots", knots)
        pairs = list(pairwise(sizes))
        self.base = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairs)
        self.curve = nn.ParameterList(torch.randn(b, a * (grid + order)) * 0.1 for a, b in pairs)

    def bases(self, x: Tensor) -> Tensor:
        x, knots = x.unsqueeze(-1), self.knots
        found = ((x >= knots[:-1]) & (x < knots[1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - knots[: -k - 1]) / (knots[k:-1] - knots[: -k - 1])
            right = (knots[k + 1 :] - x) / (knots[k + 1 :] - knots[1:-k])
            found = left * found[..., :-1] + right * found[..., 1:]
        return found

    def forward(self, x: Tensor) -> Tensor:
        for base, curve in zip(self.base, self.curve, strict=True):
            x = base(F.silu(x)) + F.linear(self.bases(x).flatten(1), curve)
        return x


class RadialBasis(nn.Module):
    """Distances to trained centres."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(20, 4))
        self.width = nn.Parameter(torch.rand(20) + 0.5)
        self.out = nn.Linear(20, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.exp(-(torch.cdist(x, self.centres) ** 2) * self.width))


class Quantiles(nn.Module):
    """Quantiles that cannot cross: the first one, and positive steps."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 32), nn.Mish(), nn.Linear(32, 7))

    def forward(self, x: Tensor) -> Tensor:
        first, steps = self.body(x).split([1, 6], dim=-1)
        return torch.cat([first, first + F.softplus(steps).cumsum(-1)], dim=-1)


class MixtureDensity(nn.Module):
    """The log-probability of a target under a mixture, with torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 32), nn.Tanh())
        self.weights, self.means, self.spreads = (nn.Linear(32, 4) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        from torch.distributions import Categorical, MixtureSameFamily, Normal

        hidden = self.body(x)
        parts = Normal(self.means(hidden), F.softplus(self.spreads(hidden)) + 1e-3)
        mixture = MixtureSameFamily(Categorical(logits=self.weights(hidden)), parts)
        return mixture.log_prob(target)


class Coupling(nn.Module):
    """RealNVP (Dinh et al. 2016): the log-probability of a row."""

    def __init__(self, features: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.masks: Tensor
        self.register_buffer(
            "masks", torch.stack([(torch.arange(features) + i) % 2 for i in range(layers)]).float()
        )
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 2 * features))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
        for mask, net in zip(self.masks, self.nets, strict=True):
            scale, shift = net(x * mask).chunk(2, dim=-1)
            scale = torch.tanh(scale) * (1 - mask)
            x = x * torch.exp(scale) + shift * (1 - mask)
            total = total + scale.sum(-1)
        base = torch.distributions.Normal(0.0, 1.0)
        return base.log_prob(x).sum(-1) + total


def zuko_spline() -> nn.Module:
    """A neural spline flow from PyPI's zuko: the log-probability of a row."""
    import zuko

    return LogProbability(zuko.flows.NSF(features=4, transforms=2, hidden_features=(24, 24)))


class LogProbability(nn.Module):
    def __init__(self, flow: Any) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: Tensor) -> Tensor:
        return self.flow().log_prob(x)


def nflows_autoregressive() -> nn.Module:
    """A masked autoregressive flow from PyPI's nflows."""
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow
    from nflows.transforms import (
        CompositeTransform,
        MaskedAffineAutoregressiveTransform,
        ReversePermutation,
    )

    steps: list[Any] = []
    for _ in range(2):
        steps.append(ReversePermutation(features=5))
        steps.append(MaskedAffineAutoregressiveTransform(features=5, hidden_features=16))
    return FlowLogProbability(Flow(CompositeTransform(steps), StandardNormal([5])))


class FlowLogProbability(nn.Module):
    def __init__(self, flow: Any) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, inputs: Tensor) -> Tensor:
        return self.flow.log_prob(inputs)


class Calibration(nn.Module):
    """A scale factor from a polynomial and bins, as calibrations are written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.edges: Tensor
        self.scale: Tensor
        self.register_buffer("edges", torch.tensor([-2.5, -1.3, 0.0, 1.3, 2.5]))
        self.register_buffer("scale", torch.linspace(0.9, 1.1, 6))

    def forward(self, pt: Tensor, eta: Tensor) -> Tensor:
        log_pt = torch.log(pt.clamp(min=1.0) / 50)
        response = 1 + 0.02 * log_pt - 0.004 * log_pt**2
        bins = torch.bucketize(eta, self.edges)
        return torch.where(pt > 10, self.scale[bins] / response, torch.ones_like(pt))


class Positional(nn.Module):
    """Fourier features of two coordinates, then layer norm and GELU (NeRF, Mildenhall 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.powers: Tensor
        self.register_buffer("powers", 2.0 ** torch.arange(4) * math.pi)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        angles = (x[..., None] * self.powers).flatten(1)
        return self.net(torch.cat([angles.sin(), angles.cos()], dim=-1))
