"""An interaction network on the hits and edges of one event, with any number of each.

After Battaglia et al., arXiv:1612.00222, as DeZoort et al., arXiv:2103.16701, use it for charged
tracks. The message of an edge is computed from the hits at its ends and from the edge itself; a hit
sums the messages that arrive; at the end every edge and every hit gets a score.

**Edges whose source or target is not a hit of the event are ignored**: they send no message and
have score 0. So an artifact never reads or writes outside the event for any values in the index
columns, and an event may have no hits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two linear layers with a ReLU between them."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class Interaction(nn.Module):
    """One round of messages. The last node is an additional one, for the ignored edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = _mlp(3 * width, width, width)
        self.update = _mlp(2 * width, width, width)

    def forward(
        self, nodes: Tensor, edges: Tensor, source: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(N + 1, W), (E, W), (E,), (E,) -> (N + 1, W), (E, W); both residual."""
        ends = [nodes.index_select(0, source), nodes.index_select(0, target), edges]
        message = self.message(torch.cat(ends, dim=1))
        # index_add and scatter_add sum in the order of the edges if one thread does it.
        arrived = torch.zeros_like(nodes).index_add(0, target, message)
        return nodes + self.update(torch.cat([nodes, arrived], dim=1)), edges + message


class EdgeGNN(nn.Module):
    """Encoders of hits and edges to `width` numbers, `rounds` of messages, and the two scores."""

    def __init__(self, node_features: int, edge_features: int, width: int, rounds: int) -> None:
        super().__init__()
        self.encode_nodes = nn.Linear(node_features, width)
        self.encode_edges = nn.Linear(edge_features, width)
        self.rounds = nn.ModuleList([Interaction(width) for _ in range(rounds)])
        self.edge_head = _mlp(3 * width, width, 1)
        self.node_head = _mlp(width, width, 2)

    def forward(self, nodes: Tensor, index: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        """Score N hits and E edges.

        nodes: (N, F) float32; index: (E, 2) int32 or int64, source and target as rows of nodes;
        edges: (E, G) float32.
        Returns the edges' scores (E,) and the nodes' (N, 2), float32.
        """
        count = nodes.shape[0]
        exists = ((index >= 0) & (index < count)).all(dim=1)
        # An additional node at the end, for the ignored edges: so no index is out of range, and
        # gathering works in an event without hits. (With the node at the front, torch 2.13 compiles
        # a masked load that reads up to seven elements beyond the last hit.)
        inside = torch.where(exists.unsqueeze(1), index, count).to(torch.int64)
        source, target = inside[:, 0], inside[:, 1]
        hidden = torch.relu(self.encode_nodes(nn.functional.pad(nodes, [0, 0, 0, 1])))
        latent = torch.relu(self.encode_edges(edges))
        for interaction in self.rounds:
            hidden, latent = interaction(hidden, latent, source, target)
        ends = [hidden.index_select(0, source), hidden.index_select(0, target), latent]
        score = torch.sigmoid(self.edge_head(torch.cat(ends, dim=1))).squeeze(1)
        node_scores: Tensor = self.node_head(hidden[:count])
        return torch.where(exists, score, 0.0), node_scores


def edge_gnn(
    node_features: int = 3, edge_features: int = 4, width: int = 16, rounds: int = 2
) -> nn.Module:
    """The model with random weights from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return EdgeGNN(node_features, edge_features, width, rounds)


def reference(rows: dict[str, int], seed: int) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Inputs of `configs/zoo/edge_gnn.yaml`.

    The validation of smaller sizes uses the first nodes and the first edges. The ends of edges are
    drawn on a logarithmic scale, so that edges remain for every pair of sizes: as many edges end at
    the first ten nodes as at the next ninety. Some 1 in 32 edges have an invalid target.
    """
    rng = np.random.default_rng(seed)
    n, e = rows["nodes"], rows["edges"]
    layer = rng.integers(1, 11, n)
    hits = {
        "r": (0.1 * layer + rng.normal(0.0, 0.002, n)).astype(np.float32),
        "phi": rng.uniform(-np.pi, np.pi, n).astype(np.float32),
        "z": rng.normal(0.0, 0.3, n).astype(np.float32),
    }
    # The logarithm of 1 + end is uniform from 0 to that of n + 1.
    ends = (np.floor((n + 1.0) ** rng.random((2, e))) - 1).astype(np.int32)
    # A negative number in 1 of 32 edges, as source or as target.
    ends[rng.integers(0, 2, e), np.arange(e)] *= np.where(rng.random(e) < 1 / 32, -1, 1)
    nowhere = rng.random(e) < 1 / 32
    ends[1, nowhere] = rng.choice([-1, n, 2**31 - 1], np.count_nonzero(nowhere))
    edges: dict[str, npt.NDArray[Any]] = {"source": ends[0], "target": ends[1]}
    for name in ("dr", "dphi", "dz", "angle"):
        edges[name] = rng.normal(0.0, 0.5, e).astype(np.float32)
    return {"hits": hits, "edges": edges}
