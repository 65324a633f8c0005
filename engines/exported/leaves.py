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


def walk(
    x: torch.Tensor,
    feature: torch.Tensor,
    threshold: torch.Tensor,
    below: torch.Tensor,
    roots: torch.Tensor,
    inner: int,
    depth: int,
    equal: bool,
) -> torch.Tensor:
    """(n, F) -> (n, T), int64: the number of the leaf that each row reaches in each of T trees.

    The nodes of all trees are `feature` and `threshold`, (N,), of which the first `inner` have two
    children: `below`, (2N,), has the left and the right child of each. The others are leaves,
    numbered from 0; each is its own child. The leaves of a tree have successive numbers, from left
    to right. A row starts at each of the `roots`, (T,), and goes down at most `depth` levels: to
    the left if its feature is below the threshold, or if it is `equal` to it and `equal` is true.
    No feature is NaN.
    """
    node = roots.expand(x.shape[0], -1)
    for _ in range(depth):
        value, limit = x.gather(1, feature[node]), threshold[node]
        left = value <= limit if equal else value < limit
        node = below[2 * node + (~left).to(node.dtype)]  # the left child, or the one beside it
    return node - inner


_LIBRARY.impl("leaves", walk, "CompositeImplicitAutograd")
