"""Networks on items of a row: sets, sequences, graphs, images."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# mypy: disable-error-code="no-any-return,no-untyped-call,no-untyped-def"


def dense(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DeepSets(nn.Module):
    """Zaheer et al. 2017, with a bool mask and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.rho = dense(3, 32, 32), dense(32, 32, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.phi(x).masked_fill(~mask.unsqueeze(-1), 0.0)
        return self.rho(h.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


class ParticleFlow(nn.Module):
    """PFN (Komiske et al. 2018): an item whose pt is 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.f = dense(4, 32, 32, 16), dense(16, 32, 2)

    def forward(self, particles: Tensor) -> Tensor:
        exists = (particles[..., :1] > 0).to(particles.dtype)
        return self.f((self.phi(particles) * exists).sum(dim=1)).log_softmax(-1)


class EnergyFlow(nn.Module):
    """EFN (Komiske et al. 2018): weights z, positions p."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.f = dense(2, 24, 16), dense(16, 24, 1)

    def forward(self, z: Tensor, p: Tensor) -> Tensor:
        return torch.sigmoid(self.f(torch.einsum("ni,nif->nf", z, self.phi(p))))


class LongShort(nn.Module):
    """An LSTM over tracks, the last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 24, batch_first=True)
        self.head = nn.Linear(24, 3)

    def forward(self, tracks: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(tracks)
        return self.head(hidden[-1])


class BothWays(nn.Module):
    """Two layers of a bidirectional GRU, the mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.gru(x)
        return self.head(found.mean(dim=1))


class BatchSecond(nn.Module):
    """A GRU as torch has it by default: (sequence, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.gru(x)
        return self.head(found[-1])


class Causal(nn.Module):
    """A temporal convolutional network with weight norm (Bai et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(
            norm(nn.Conv1d(4 if i == 0 else 16, 16, 3, dilation=2**i)) for i in range(3)
        )
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(F.pad(x, (2 * 2**i, 0))))
        return self.head(x[:, :, -1])


class Wave(nn.Module):
    """Gated dilated convolutions with skips, on a pulse (WaveNet, van den Oord et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 1)
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=d, padding=d) for d in (1, 2, 4))
        self.out = nn.Conv1d(8, 1, 1)

    def forward(self, pulse: Tensor) -> Tensor:
        x, length = self.first(pulse.unsqueeze(1)), pulse.shape[-1]
        skips = torch.zeros_like(x)
        for gate in self.gates:
            signal, opened = gate(x)[..., :length].chunk(2, dim=1)
            made = torch.tanh(signal) * torch.sigmoid(opened)
            x, skips = x + made, skips + made
        return self.out(F.relu(skips)).squeeze(1).amax(-1)


class Encoder(nn.Module):
    """torch's own transformer encoder, with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.encoder(self.embed(x), src_key_padding_mask=~mask)
        there = mask.unsqueeze(-1).to(h.dtype)
        return self.head((h * there).sum(1) / there.sum(1).clamp(min=1))


class SetTransformer(nn.Module):
    """Induced set attention and pooling by a seed (Lee et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.inducing = nn.Parameter(torch.randn(1, 6, 16))
        self.seed = nn.Parameter(torch.randn(1, 1, 16))
        self.down, self.up, self.pool = (
            nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        inner, _ = self.down(self.inducing.expand(x.size(0), -1, -1), h, h)
        h = self.norm(h + self.up(h, inner, inner)[0])
        pooled, _ = self.pool(self.seed.expand(x.size(0), -1, -1), h, h)
        return self.head(pooled.squeeze(1))


class Pairs(nn.Module):
    """Attention with pairwise physics as a bias (Particle Transformer, Qu et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.bias = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GELU(), nn.Conv2d(8, 2, 1))
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, four_vectors: Tensor) -> Tensor:
        px, py, pz, _ = four_vectors.unbind(-1)
        pt = torch.sqrt(px**2 + py**2 + 1e-8)
        eta, phi = torch.asinh(pz / pt), torch.atan2(py, px)
        d_phi = (phi[:, :, None] - phi[:, None, :] + torch.pi) % (2 * torch.pi) - torch.pi
        delta = torch.sqrt((eta[:, :, None] - eta[:, None, :]) ** 2 + d_phi**2 + 1e-8)
        least = torch.minimum(pt[:, :, None], pt[:, None, :])
        pairs = torch.stack(
            [delta.log(), (least * delta).clamp(min=1e-6).log(), least.log()], dim=1
        )
        q, k, v = self.qkv(self.embed(torch.log1p(four_vectors.abs()))).chunk(3, dim=-1)
        n, items, _ = q.shape
        q, k, v = (t.reshape(n, items, 2, 8).transpose(1, 2) for t in (q, k, v))
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(pairs))
        return self.out(h.transpose(1, 2).reshape(n, items, 16)).mean(1)


class EdgeConvolution(nn.Module):
    """ParticleNet's block (Qu, Gouskos 2019): neighbours by topk and gather."""

    def __init__(self, k: int = 4) -> None:
        super().__init__()
        self.k = k
        self.net = nn.Sequential(nn.Conv2d(6, 16, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, 2)

    def forward(self, points: Tensor, features: Tensor) -> Tensor:
        inner = -2 * torch.matmul(points.transpose(2, 1), points)
        squares = (points**2).sum(dim=1, keepdim=True)
        distance = -squares - inner - squares.transpose(2, 1)
        near = distance.topk(k=self.k + 1, dim=-1)[1][:, :, 1:]
        n, channels, items = features.shape
        index = near.reshape(n, 1, items * self.k).expand(-1, channels, -1)
        others = features.gather(2, index).reshape(n, channels, items, self.k)
        own = features.unsqueeze(-1).expand_as(others)
        return self.head(self.net(torch.cat([own, others - own], 1)).mean(-1).mean(-1))


class GravNet(nn.Module):
    """Distance-weighted neighbours in a learned space (Qasim et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.features = nn.Linear(5, 2), nn.Linear(5, 8)
        self.out = nn.Linear(21, 3)

    def forward(self, hits: Tensor) -> Tensor:
        place, carried = self.space(hits), self.features(hits)
        distance = torch.cdist(place, place) ** 2
        near, index = torch.topk(distance, 5, dim=-1, largest=False)
        n, items, k = index.shape
        picked = carried.gather(1, index.flatten(1).unsqueeze(-1).expand(-1, -1, 8))
        weighted = picked.view(n, items, k, 8) * torch.exp(-10 * near).unsqueeze(-1)
        both = torch.cat([hits, weighted.mean(2), weighted.max(2).values], dim=-1)
        return F.elu(self.out(both))


class Interaction(nn.Module):
    """An interaction network with fixed senders and receivers (JEDI-net, Moreno et al. 2019)."""

    def __init__(self, items: int = 8) -> None:
        super().__init__()
        pairs = [(i, j) for i in range(items) for j in range(items) if i != j]
        receive, send = torch.zeros(items, len(pairs)), torch.zeros(items, len(pairs))
        for edge, (i, j) in enumerate(pairs):
            receive[i, edge] = send[j, edge] = 1.0
        self.receive: Tensor
        self.send: Tensor
        self.register_buffer("receive", receive)
        self.register_buffer("send", send)
        self.edges, self.nodes, self.last = dense(6, 16, 8), dense(11, 16, 8), dense(8, 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.cat([x @ self.receive, x @ self.send], dim=1).transpose(1, 2)
        effects = self.edges(pairs).transpose(1, 2) @ self.receive.t()
        nodes = self.nodes(torch.cat([x, effects], dim=1).transpose(1, 2))
        return self.last(nodes.sum(1))


class JetFlavour(nn.Module):
    """Convolutions of width 1, an LSTM, global features (DeepJet, Bols et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.candidates = nn.Sequential(
            nn.Conv1d(6, 16, 1), nn.ReLU(), nn.Dropout(0.1), nn.Conv1d(16, 8, 1), nn.ReLU()
        )
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = dense(16 + 5, 32, 6)

    def forward(self, globals_: Tensor, candidates: Tensor) -> Tensor:
        sequence = self.candidates(candidates.transpose(1, 2)).transpose(1, 2)
        last = self.lstm(sequence.flip(1))[0][:, -1]
        return self.head(torch.cat([globals_, last], dim=1)).softmax(dim=1)


class Lorentz(nn.Module):
    """Minkowski products as messages (LorentzNet, Gong et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.metric: Tensor
        self.register_buffer("metric", torch.tensor([1.0, -1.0, -1.0, -1.0]))
        self.message, self.gate, self.head = dense(2, 16, 8), nn.Linear(8, 1), dense(8, 8, 2)

    def forward(self, p: Tensor) -> Tensor:
        difference = p.unsqueeze(2) - p.unsqueeze(1)
        norms = (difference**2 * self.metric).sum(-1)
        products = torch.einsum("nia,a,nja->nij", p, self.metric, p)
        both = torch.stack([norms, products], dim=-1)
        message = self.message(torch.sign(both) * torch.log1p(both.abs()))
        return self.head((message * torch.sigmoid(self.gate(message))).sum(2).mean(1))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021), as on FPGAs for jets."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = dense(16, 16, 16), dense(3, 12, 3)
        self.norms = nn.ModuleList([nn.LayerNorm(3), nn.LayerNorm(3)])
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norms[0](x).mT).mT
        x = x + self.channels(self.norms[1](x))
        return self.head(x.flatten(1))


def dense_graph() -> nn.Module:
    """Dense graph convolutions from PyPI's torch_geometric, on a full graph."""
    from torch_geometric.nn.dense import DenseGCNConv, DenseSAGEConv

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = DenseGCNConv(3, 16), DenseSAGEConv(16, 16)
            self.head = nn.Linear(16, 2)

        def forward(self, x: Tensor, adj: Tensor) -> Tensor:
            h = self.first(x, adj).relu()
            return self.head(self.second(h, adj).relu().mean(dim=1))

    return Graph()


class Calorimeter(nn.Module):
    """Convolutions on an image of towers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(64, 2),
        )  # fmt: skip

    def forward(self, image: Tensor) -> Tensor:
        return self.net(image)


class Taus(nn.Module):
    """A network like DeepTau (CMS 2022): 11 by 11 cells with 12 features, 1,452 columns."""

    def __init__(self) -> None:
        super().__init__()
        cells: list[nn.Module] = []
        for a, b, width in ((12, 32, 1), (32, 24, 1), *[(24, 24, 3)] * 5):
            cells += [nn.Conv2d(a, b, width), nn.BatchNorm2d(b), nn.ReLU()]
        self.cells, self.head = nn.Sequential(*cells), dense(24, 48, 4)

    def forward(self, x: Tensor) -> Tensor:
        grid = x.reshape(-1, 12, 11, 11)
        return self.head(self.cells(grid).flatten(1)).softmax(-1)


class Residual(nn.Module):
    """Two residual blocks with strides on three layers of a calorimeter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (8, 8, 16, 16))
        self.a, self.b = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.skip, self.c = nn.Conv2d(8, 16, 1, 2), nn.Conv2d(16, 16, 3, 1, 1)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.first(x)))
        x = F.relu(x + self.norms[1](self.a(x)))
        y = F.relu(self.norms[2](self.b(x)))
        x = F.relu(self.skip(x) + self.norms[3](self.c(y)))
        return self.head(x.mean(dim=(2, 3)))


class Segmentation(nn.Module):
    """A small U-Net: for each tower the probability to be signal."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 12, 3, padding=1)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.out = nn.Conv2d(12, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        full = F.relu(self.down(image.unsqueeze(1)))
        half = F.relu(self.inner(F.max_pool2d(full, 2)))
        return torch.sigmoid(self.out(torch.cat([full, self.up(half)], 1))).squeeze(1)


class Fields(nn.Module):
    """A factorization machine over hashed fields (DeepFM, Guo et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.factors, self.bias = nn.Embedding(60, 6), nn.Embedding(60, 1)
        self.deep = dense(30, 16, 1)

    def forward(self, fields: Tensor) -> Tensor:
        v = self.factors(fields)
        crossed = 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(-1, keepdim=True)
        return torch.sigmoid(self.bias(fields).sum(1) + crossed + self.deep(v.flatten(1)))
