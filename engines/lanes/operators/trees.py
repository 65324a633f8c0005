"""Decision trees: makes the tables of `Forest` for the operator `soa_pipeline::leaves`.

For the operator see engines/exported/leaves.py, for the tables and their words `Forest`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engines.lanes.operators.registry import Operator, lowers
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import UNKNOWN, Forest, Leaves, Paths, Ranks
from engines.lanes.values import Tensor

Array = npt.NDArray[Any]

_BITS = 32  # of a word
_MOST_WORDS, _MOST_COLUMNS = 2048, 1024  # of a row: 20 kB on a thread's stack
_TOGETHER = 12  # the most trees in which a row goes down at once
_MOST_MASK_WORDS = 1 << 16  # of all masks of `Ranks`: 256 kB, which fit into the L2 cache
_WIDTH = 16  # words of a mask that the loops in kernels.h take at once
_STEP = 8  # `Ranks.step` is a multiple of this
# Measured: going down from the roots is faster than clearing bits
# - for any number of rows, if the forest has more than _DEEP entries (a node in a word) for each
#   node that a row meets on its way down,
_DEEP = 60
# - for a few rows also if a row meets fewer nodes than it has words, plus _SHORT.
_SHORT = 100


@lowers("leaves")
def leaves(
    build: Builder, op: Operator, x: Tensor, feature: Any, threshold: Any, below: Any, roots: Any,
    inner: int, depth: int, equal: bool, /,
) -> Tensor:  # fmt: skip
    """The number of the leaf that each row reaches in each tree. For the arguments see the operator
    in engines/exported/leaves.py. Raises NotKnown for trees that have no `Forest`."""
    if not all(isinstance(table, torch.Tensor) for table in (feature, threshold, below, roots)):
        raise NotKnown("trees that differ between rows")
    if UNKNOWN in x.shape:
        raise NotKnown("trees that score any number of items")
    children = below.numpy().reshape(-1, 2)
    trees = _Trees(feature.numpy(), threshold.numpy(), children, roots.numpy(), inner)
    forest = _build_forest(trees, depth, equal, x.shape[1])
    return build.cast(build.add(Leaves(build.storable(x), forest)), "int64")


@dataclass(frozen=True)
class _Trees:
    """Trees as in engines/exported/leaves.py: N nodes. The first `inner` have children, and the
    others are leaves.

    feature, threshold : (N,), the column that a node compares, and with what.
    children : (N, 2), the left and the right child of a node; a leaf is its own child.
    roots : (T,), the first node of each tree.
    """

    feature: Array
    threshold: Array
    children: Array
    roots: Array
    inner: int


def _build_forest(trees: _Trees, depth: int, equal: bool, columns: int) -> Forest:
    """The tables of trees that score rows of `columns` columns. Raises NotKnown if a node compares
    another column, or if the leaves are not numbered in order. `depth`, `equal`: see the operator.
    """
    if not ((trees.feature >= 0) & (trees.feature < columns)).all():
        raise NotKnown("trees with other columns")
    below = _find_leaves_below(trees, depth)
    first_leaves, last_leaves = below.first[trees.roots], below.last[trees.roots]
    words_of_trees = -(-(last_leaves - first_leaves + 1) // _BITS)  # the quotient, rounded up
    first_words = np.append(0, np.cumsum(words_of_trees))
    words = int(first_words[-1])
    nodes = _list_entries(trees, below, first_words)
    ordered = nodes.in_order(np.argsort(nodes.word, kind="stable"))
    paths = _build_paths(trees, columns, len(nodes.word), words)
    return Forest(
        thresholds=torch.from_numpy(ordered.threshold),
        nodes=_pair_as_int32(ordered.column, ordered.kept),
        words=_as_int32(np.searchsorted(ordered.word, np.arange(words + 1))),
        trees=_pair_as_int32(first_words, np.append(first_leaves, last_leaves[-1] + 1)),
        equal=equal,
        ranks=_build_ranks(nodes, words, columns) if paths is None else None,
        paths=paths,
    )


class _LeavesBelow(NamedTuple):
    """The numbers of the first and the last leaf below each node. For a leaf both are its own."""

    first: Array
    last: Array


def _find_leaves_below(trees: _Trees, depth: int) -> _LeavesBelow:
    """Finds the leaves below each node of trees with at most `depth` levels of inner nodes. Raises
    NotKnown if the leaves are not numbered from left to right, tree after tree."""
    nodes, inner = len(trees.feature), trees.inner
    left, right = trees.children[:inner].T
    first = np.full(nodes, nodes)
    last = np.full(nodes, -1)
    first[inner:] = last[inner:] = np.arange(nodes - inner)
    for _ in range(depth):  # each pass is right for one more level, from the leaves upwards
        first[:inner] = np.minimum(first[left], first[right])
        last[:inner] = np.maximum(last[left], last[right])
    if not (last[left] + 1 == first[right]).all() or (np.diff(first[trees.roots]) <= 0).any():
        raise NotKnown("trees whose leaves are not numbered from left to right")
    return _LeavesBelow(first, last)


class _Nodes(NamedTuple):
    """Entries: one for each inner node and each word in which the node clears bits.

    column, threshold : the column that the node compares, and with what.
    word : the number of the word.
    kept : the bits of the word that are kept if a row goes right at the node.
    """

    column: Array
    threshold: Array
    word: Array
    kept: Array

    def in_order(self, order: Array) -> _Nodes:
        """The entries in the given order: entry `order[0]` comes first."""
        return _Nodes(*(values[order] for values in self))


def _list_entries(trees: _Trees, below: _LeavesBelow, first_words: Array) -> _Nodes:
    """The entries of all inner nodes, node after node. `first_words`: the first word of each tree.

    A row that goes right at a node reaches none of the leaves below the node's left child, so the
    node clears their bits.
    """
    left, first_leaves = trees.children[: trees.inner, 0], below.first[trees.roots]
    tree = np.searchsorted(first_leaves, below.first[: trees.inner], "right") - 1  # of each node
    # For each node, the first and the last leaf below its left child, counted in the tree.
    begin, end = below.first[left] - first_leaves[tree], below.last[left] - first_leaves[tree]
    counts = end // _BITS - begin // _BITS + 1  # the words in which each node clears bits
    # All that follows is for each entry. `number` counts the entries of a node from 0.
    node = np.repeat(np.arange(trees.inner), counts)
    number = np.arange(len(node)) - np.repeat(np.cumsum(counts) - counts, counts)
    word = begin[node] // _BITS + number  # counted in the tree
    low = np.maximum(begin[node] - word * _BITS, 0)
    high = np.minimum(end[node] - word * _BITS, _BITS - 1)
    cleared = ((1 << (high - low + 1)) - 1) << low  # the bits from `low` to `high`
    kept = (~cleared).astype(np.uint32).view(np.int32)
    return _Nodes(trees.feature[node], trees.threshold[node], first_words[tree[node]] + word, kept)


def _build_ranks(nodes: _Nodes, words: int, columns: int) -> Ranks | None:
    """Sorts the nodes by column and threshold, and makes their masks. Returns None if there are too
    many words or columns, or if a single mask for each column has too many words already."""
    width = -(-words // _WIDTH) * _WIDTH
    masks_left = _MOST_MASK_WORDS / width - columns  # each column begins with a mask
    if width > _MOST_WORDS or columns > _MOST_COLUMNS or masks_left < 1:
        return None
    # So many nodes from one mask to the next that no more than `masks_left` are made.
    step = _STEP * max(1, math.ceil(len(nodes.word) / masks_left / _STEP))
    ordered = nodes.in_order(np.lexsort((nodes.threshold, nodes.column)))
    first_nodes = np.searchsorted(ordered.column, np.arange(columns + 1))
    masks, first_masks = [], [0]
    for begin, end in itertools.pairwise(first_nodes):
        mask = np.full(width, -1, np.int32)
        masks.append(mask.copy())
        for first in range(begin, end - step + 1, step):
            chunk = slice(first, first + step)
            np.bitwise_and.at(mask, ordered.word[chunk], ordered.kept[chunk])
            masks.append(mask.copy())
        first_masks.append(len(masks))
    return Ranks(
        thresholds=torch.from_numpy(ordered.threshold),
        nodes=_pair_as_int32(ordered.word, ordered.kept),
        columns=_pair_as_int32(first_nodes, np.array(first_masks)),
        masks=_as_int32(np.stack(masks)),
        step=step,
    )


def _build_paths(trees: _Trees, columns: int, entries: int, words: int) -> Paths | None:
    """Makes the table of nodes for rows that go down from the roots. Returns None if that is slower
    than clearing bits, as judged from the number of `entries` (see `_Nodes`) and of `words`."""
    levels = list(_levels(trees))
    # How many inner nodes a row meets on average. If half of the rows at a node go to each side, a
    # row meets a node of level k with probability 2^-k.
    nodes_met = sum(np.count_nonzero(level < trees.inner) / 2**k for k, level in enumerate(levels))
    deep = entries > _DEEP * nodes_met
    if columns > _MOST_COLUMNS or not (deep or nodes_met < words + _SHORT):
        return None
    rounds = math.ceil(len(trees.roots) / _TOGETHER)
    together = math.ceil(len(trees.roots) / rounds)  # about as many trees in each round
    return Paths(_path_table(trees, np.concatenate(levels), columns), together, deep)


def _levels(trees: _Trees) -> Iterator[Array]:
    """Yields the nodes of all trees level by level: the roots, then the children of inner nodes."""
    level = trees.roots
    while len(level):
        yield level
        level = trees.children[level[level < trees.inner]].reshape(-1)


def _path_table(trees: _Trees, order: Array, columns: int) -> torch.Tensor:
    """The table `nodes` of Paths. `order`: the numbers of all nodes in the order of the table, in
    which the two children of a node are beside each other."""
    position = np.empty(len(trees.feature), np.int64)  # of each node, in the table
    position[order] = np.arange(len(order))
    is_leaf = order >= trees.inner
    bits = trees.threshold[order].view(np.int32).reshape(len(order), -1)
    bits[is_leaf] = 0
    bits[is_leaf, 0] = order[is_leaf] - trees.inner
    column = np.where(is_leaf, columns, trees.feature[order])
    left = position[np.where(is_leaf, order, trees.children[order, 0])]
    return _as_int32(np.column_stack([column, left, bits]))


def _as_int32(values: Array) -> torch.Tensor:
    """The values as a tensor of int32."""
    return torch.from_numpy(values.astype(np.int32))


def _pair_as_int32(left: Array, right: Array) -> torch.Tensor:
    """Two arrays (n,) as the two columns of a tensor (n, 2) of int32."""
    return _as_int32(np.stack([left, right], axis=1))
