"""The operator `soa_pipeline::leaves`: the leaf of each decision tree that a row reaches.

`lanes` has code of its own for it. For other engines torch takes it apart into its own operators.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("soa_pipeline", "DEF")
_LIBRARY.define(
    "leaves(Tensor x, Tensor feature, Tensor threshold, Tensor below, Tensor roots, int inner, "
    "int depth, bool equal) -> Tensor"
)


def descend_trees(
    x: torch.Tensor,
    feature: torch.Tensor,
    threshold: torch.Tensor,
    below: torch.Tensor,
    roots: torch.Tensor,
    inner: int,
    depth: int,
    equal: bool,
) -> torch.Tensor:
    """Return the number of the leaf that each row reaches in each of T trees, (n, T), int64.

    `x` has F features of n rows, (n, F); no feature is NaN. `feature` and `threshold`, (N,), hold
    one entry for each node of all trees: the feature that the node compares, and with what.
    `below`, (2N,), holds the left and the right child of each node. The first `inner` nodes have
    two children. The others are leaves, and each is its own child. Leaves are numbered from 0, and
    in each tree from left to right.

    A row starts at each of the `roots`, (T,), and goes down `depth` levels, or fewer if it reaches
    a leaf before. It goes to the left if its feature is less than the threshold; if both are equal,
    it goes to the left only with `equal`.
    """
    node = roots.expand(x.shape[0], -1)
    for _ in range(depth):
        value, limit = x.gather(1, feature[node]), threshold[node]
        goes_left = value <= limit if equal else value < limit
        # The children of node i are below[2 * i] (left) and below[2 * i + 1] (right).
        node = below[2 * node + (~goes_left).to(node.dtype)]
    return node - inner


_LIBRARY.impl("leaves", descend_trees, "CompositeImplicitAutograd")
