"""Decision trees: `soa_pipeline::leaves`, see engines/exported/leaves.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
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
_WORDS, _COLUMNS = 2048, 1024  # the most of a row: 20 kB on a thread's stack
_TOGETHER = 12  # trees in which a row goes down at once
_DEEP = 60
"""Rows go down if the nodes clear bits in so many times as many words as a row meets nodes."""
_SHORT = 100
"""A few rows go down also if one meets fewer nodes than it has words, and so many more."""
_MASKS = 256 << 10  # bytes, which fit into L2


@lowers("leaves")
def leaves(
    build: Builder, op: Operator, x: Tensor, feature: Any, threshold: Any, below: Any, roots: Any,
    inner: int, depth: int, equal: bool, /,
) -> Tensor:  # fmt: skip
    """The leaf that each row reaches in each tree."""
    if not all(isinstance(each, torch.Tensor) for each in (feature, threshold, below, roots)):
        raise NotKnown("trees that differ between rows")
    if UNKNOWN in x.shape:
        raise NotKnown("trees that score any number of items")
    given = feature.numpy(), threshold.numpy(), below.numpy(), roots.numpy()
    forest = _forest(*given, inner, depth, equal, x.shape[1])
    return build.cast(build.add(Leaves(build.in_memory(x), forest)), "int64")


def _forest(
    feature: Array, threshold: Array, below: Array,
    roots: Array, inner: int, depth: int, equal: bool, columns: int,
) -> Forest:  # fmt: skip
    """The tables of trees. Raises NotKnown if a node compares a column that is not there, or if the
    leaves of a tree are not numbered in order."""
    if not ((feature >= 0) & (feature < columns)).all():
        raise NotKnown("trees with other columns")
    below = below.reshape(-1, 2)
    left, right = below[:inner].T
    first = np.full(len(feature), len(feature))  # of the leaves below each node
    last = np.full(len(feature), -1)
    first[inner:] = last[inner:] = np.arange(len(feature) - inner)
    for _ in range(depth):
        first[:inner] = np.minimum(first[left], first[right])
        last[:inner] = np.maximum(last[left], last[right])
    starts = first[roots]
    if not (last[left] + 1 == first[right]).all() or (np.diff(starts) <= 0).any():
        raise NotKnown("trees whose leaves are not numbered from left to right")
    leaves = last[roots] - starts + 1
    words = np.append(0, np.cumsum(-(-leaves // _BITS)))
    tree = np.searchsorted(starts, first[:inner], "right") - 1
    begin, end = first[left] - starts[tree], last[left] - starts[tree]  # those on a node's left
    counts = end // _BITS - begin // _BITS + 1
    node = np.repeat(np.arange(inner), counts)
    step = np.arange(len(node)) - np.repeat(np.cumsum(counts) - counts, counts)
    word = begin[node] // _BITS + step
    low = np.maximum(begin[node] - word * _BITS, 0)
    high = np.minimum(end[node] - word * _BITS, _BITS - 1)
    cleared = ((1 << (high - low + 1)) - 1) << low
    place = words[tree[node]] + word
    kept = (~cleared).astype(np.uint32).view(np.int32)
    nodes = _Nodes(feature[node], threshold[node], place, kept)
    order = np.argsort(place, kind="stable")
    levels = list(_levels(below, roots, inner))
    steps = sum(np.count_nonzero(level < inner) / 2**k for k, level in enumerate(levels))
    deep = len(node) > _DEEP * steps
    paths = None
    if columns <= _COLUMNS and (deep or steps < words[-1] + _SHORT):
        ordered = np.concatenate(levels)
        paths = Paths(
            _path_nodes(ordered, feature, threshold, below, inner, columns),
            math.ceil(len(roots) / math.ceil(len(roots) / _TOGETHER)),
            deep,
        )
    return Forest(
        torch.from_numpy(nodes.threshold[order]),
        _pairs(nodes.column[order], kept[order]),
        _numbers(np.searchsorted(place[order], np.arange(words[-1] + 1))),
        _pairs(words, np.append(starts, starts[-1] + leaves[-1])),
        equal,
        _ranks(nodes, words[-1], columns) if paths is None else None,
        paths,
    )


class _Nodes(NamedTuple):
    """A node for each word in which it clears bits."""

    column: Array
    threshold: Array
    word: Array
    kept: Array


def _ranks(nodes: _Nodes, words: int, columns: int) -> Ranks | None:
    """The nodes by column and threshold. None if a row's words or a mask for each column are too
    many."""
    count = len(nodes.word)
    wide = -(-words // 16) * 16
    masks_left = _MASKS / (4 * wide) - columns
    if wide > _WORDS or columns > _COLUMNS or masks_left < 1:
        return None
    step = 8 * max(1, math.ceil(count / masks_left / 8))
    order = np.lexsort((nodes.threshold, nodes.column))
    column, word, kept = nodes.column[order], nodes.word[order], nodes.kept[order]
    first = np.searchsorted(column, np.arange(columns + 1))
    masks, starts = [], [0]
    for begin, end in itertools.pairwise(first):
        own = np.full(wide, -1, np.int32)
        masks.append(own.copy())
        for at in range(begin, end - step + 1, step):
            np.bitwise_and.at(own, word[at : at + step], kept[at : at + step])
            masks.append(own.copy())
        starts.append(len(masks))
    return Ranks(
        torch.from_numpy(nodes.threshold[order]),
        _pairs(word, kept),
        _pairs(first, np.array(starts)),
        _numbers(np.stack(masks)),
        step,
    )


def _levels(below: Array, roots: Array, inner: int) -> Iterator[Array]:
    """The nodes of all trees, the roots first. If half of the rows of a node go to each side, a row
    meets a node of level k with probability 2^-k."""
    level = roots
    while len(level):
        yield level
        level = below[level[level < inner]].reshape(-1)


def _path_nodes(
    order: Array, feature: Array, threshold: Array, below: Array, inner: int, columns: int
) -> torch.Tensor:
    """The `nodes` of Paths, in an order in which two children stand beside each other."""
    place = np.empty(len(feature), np.int64)
    place[order] = np.arange(len(order))
    leaf = order >= inner
    limits = threshold[order].view(np.int32).reshape(len(order), -1)
    limits[leaf] = 0
    limits[leaf, 0] = order[leaf] - inner
    column = np.where(leaf, columns, feature[order])
    left = place[np.where(leaf, order, below[order, 0])]
    return _numbers(np.column_stack([column, left, limits]))


def _numbers(each: Array) -> torch.Tensor:
    return torch.from_numpy(each.astype(np.int32))


def _pairs(left: Array, right: Array) -> torch.Tensor:
    return _numbers(np.stack([left, right], axis=1))
