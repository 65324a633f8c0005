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
    children, at = [[0, 0]], [0]
    for _ in range(leaves - 1):
        node = at.pop(int(draw.integers(len(at))))
        children[node] = [len(children), len(children) + 1]
        at += children[node]
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
    """A tree for each number of leaves. `zero`: see Trees."""
    draw = np.random.default_rng(seed)
    trees = [drawn_tree(draw, each, features, real) for each in leaves]
    names = tuple(f"x{k}" for k in range(features))
    made = Trees(trees, [0] * len(trees), np.zeros(1), features, names, "identity", zero=zero)
    return made, trees


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
    """The sum of the leaves that each row reaches, node by node."""
    return [math.fsum(float(_leaf(tree, row, equal)) for tree in trees) for row in x]


def _leaf(tree: Tree, row: Array, equal: bool) -> Any:
    at = 0
    while tree.children[at][0] != at:
        value, limit = float(row[tree.feature[at]]), float(tree.threshold[at])
        below = value <= limit if equal else value < limit
        left = bool(tree.missing_left[at]) if math.isnan(value) else below
        at = int(tree.children[at][0 if left else 1])
    return tree.value[at]
