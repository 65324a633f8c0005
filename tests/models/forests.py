"""Decision trees drawn at random, and their answers row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from stages.model.trees import Tree, Trees

Array = npt.NDArray[Any]


def drawn_tree(draw: np.random.Generator, leaves: int, features: int, real: type) -> Tree:
    """A tree that grows at a leaf drawn at random, so that some leaves lie deep. Its thresholds are
    few, so that rows meet them, and 0 is one of them."""
    children, open_leaves = [[0, 0]], [0]  # a leaf is its own child
    for _ in range(leaves - 1):
        node = open_leaves.pop(int(draw.integers(len(open_leaves))))
        children[node] = [len(children), len(children) + 1]
        open_leaves += children[node]
        children += [[child, child] for child in children[node]]
    nodes = len(children)
    return Tree(
        np.array(children),
        draw.integers(0, features, nodes),
        np.round(draw.normal(size=nodes), 1).astype(real),
        draw.integers(0, 2, nodes) if draw.random() < 0.5 else np.zeros(nodes, int),
        draw.normal(size=nodes).astype(real),
    )


def drawn_forest(
    leaves: Sequence[int], features: int = 5, real: type = np.float32, zero: float | None = None,
    seed: int = 1,
) -> tuple[Trees, list[Tree]]:  # fmt: skip
    """A model with a tree for each number of leaves, and its trees. `zero`: see Trees."""
    draw = np.random.default_rng(seed)
    trees = [drawn_tree(draw, count, features, real) for count in leaves]
    names = tuple(f"x{k}" for k in range(features))
    model = Trees(trees, [0] * len(trees), np.zeros(1), features, names, "identity", zero=zero)
    return model, trees


class Forest(nn.Module):
    """The score of six features by decision trees, usually of one, two and seven words."""

    def __init__(self, leaves: Sequence[int] = (20, 40, 200, 7, 9)) -> None:
        super().__init__()
        self.trees, _ = drawn_forest(leaves, features=6)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.trees(x).unsqueeze(1),)


def rows_for(trees: list[Tree], features: int, n: int, seed: int = 2) -> Array:
    """Rows at thresholds, at the float32 next to them, and at special values."""
    draw = np.random.default_rng(seed)
    limits = np.concatenate([tree.threshold for tree in trees]).astype(np.float32)
    near = [np.nextafter(limits, np.float32(side)) for side in (-np.inf, np.inf)]
    special = np.array([np.nan, 0, -0.0, np.inf, -np.inf, 1e-40, 3e38], np.float32)
    values = np.concatenate([limits, *near, np.tile(special, 1 + len(limits) // 8)])
    return draw.choice(values, (n, features)).astype(np.float32)


def sums(trees: list[Tree], x: Array, equal: bool) -> list[float]:
    """The sum of the leaves that each row reaches, node by node. `equal`: a value equal to a
    threshold goes left, as in LightGBM; in xgboost it goes right."""
    return [math.fsum(float(_leaf(tree, row, equal)) for tree in trees) for row in x]


def _leaf(tree: Tree, row: Array, equal: bool) -> Any:
    """The value of the leaf that a row reaches; a leaf is a node that is its own child."""
    node = 0
    while tree.children[node][0] != node:
        value, limit = float(row[tree.feature[node]]), float(tree.threshold[node])
        if math.isnan(value):
            left = bool(tree.missing_left[node])
        else:
            left = value <= limit if equal else value < limit
        node = int(tree.children[node][0 if left else 1])
    return tree.value[node]
