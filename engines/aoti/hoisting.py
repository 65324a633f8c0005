"""Moves linear layers in front of the gathers and repeats that produce their inputs.

A graph network applies a layer to every edge, for example to `cat([x[i], x[j] - x[i]])` for the k
neighbours of each point. The layer is linear, and gathering, repeating and concatenating only
rearrange rows. So the layer can be applied to the points, which are k times fewer, and its results
are gathered. The numbers are the same except for rounding, with less work. A layer is moved as far
forward as the number of multiplications decreases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from engines.exported import as_node, bounds, insert, sizes

aten = torch.ops.aten

# Default values of a convolution's arguments.
_CONVOLUTION_DEFAULTS: tuple[Any, ...] = (None, None, None, [1], [0], [1], 1)

# A move changes the rounding. So a layer is moved only if at most this part of its multiplications
# remains.
_LARGEST_REST = 0.8


@dataclass(frozen=True)
class _Layer:
    """A linear layer on `source`, whose features lie along `dim`.

    `weight` has shape (outputs, features), and for a convolution one more size 1 for each position.
    """

    source: Node
    dim: int
    weight: Node
    bias: Node | None


def hoist_linear(program: ExportedProgram) -> int:
    """Move layers in place where it saves enough work. Returns the number of moved layers."""
    graph = program.graph_module.graph
    moved = 0
    for node in list(graph.nodes):
        layer = _layer(node)
        if layer is None:
            continue
        at_best = _fewest_multiplications(layer.source, layer.dim)
        if at_best > _LARGEST_REST * _multiplications(layer.source):
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(_hoisted(graph, layer))
        moved += 1
    if moved:
        graph.eliminate_dead_code()
        graph.lint()
    return moved


def linear_for_convolutions(program: ExportedProgram) -> None:
    """Replace each convolution with kernel size 1 by a linear layer, in place.

    The features become the last dimension, so that the positions of all rows form one matrix.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        layer = _layer(node)
        if layer is None or node.target is aten.linear.default:
            continue
        rank = len(sizes(node))
        with graph.inserting_before(node):
            shape = [int(size) for size in sizes(layer.weight)[:2]]
            weight = insert(graph, aten.reshape.default, layer.weight, shape)
            features_last = [0, *range(2, rank), 1]
            features_second = [0, rank - 1, *range(1, rank - 1)]
            turned = insert(graph, aten.permute.default, layer.source, features_last)
            linear = insert(graph, aten.linear.default, turned, weight, layer.bias)
            result = insert(graph, aten.permute.default, linear, features_second)
        node.replace_all_uses_with(result)
    graph.eliminate_dead_code()
    graph.lint()


def _layer(node: Node) -> _Layer | None:
    """The layer, if the node is a linear layer or a convolution with kernel size 1, else None."""
    source: Any
    weight: Any
    arguments: tuple[Any, ...] = node.args
    if node.target is aten.linear.default:
        source, weight, bias = (*arguments, None)[:3]
        return _Layer(source, len(sizes(source)) - 1, weight, bias)
    if node.target not in (aten.conv1d.default, aten.conv2d.default):
        return None
    defaults = _CONVOLUTION_DEFAULTS[len(arguments) :]
    source, weight, bias, stride, padding, _, groups = (*arguments, *defaults)
    one_place = set(sizes(weight)[2:]) == {1} and set(stride) == {1} and set(padding) == {0}
    if not one_place or groups != 1 or len(sizes(source)) != len(sizes(weight)):
        return None  # it has other kernels or groups, or its input has no dimension of a batch
    return _Layer(source, 1, weight, bias)


def _hoisted(graph: Graph, layer: _Layer) -> Node:
    """The layer's result, from products of matrices as far forward as it saves work."""
    outputs, features = (int(size) for size in sizes(layer.weight)[:2])
    weight = layer.weight
    if len(sizes(weight)) > 2:
        weight = insert(graph, aten.reshape.default, weight, [outputs, features])
    product = _applied(graph, layer.source, layer.dim, weight)
    if layer.bias is None:
        return product
    dims_behind = len(sizes(layer.source)) - 1 - layer.dim
    bias = insert(graph, aten.reshape.default, layer.bias, [outputs] + [1] * dims_behind)
    return insert(graph, aten.add.Tensor, product, bias)


def _applied(graph: Graph, value: Node, dim: int, weight: Node) -> Node:
    """Apply `weight`, (outputs, features), along `dim` of `value`: as far in front of `value` as it
    saves work."""
    passage = _passage(value, dim)
    if passage is None or _fewest_multiplications(value, dim) >= _multiplications(value):
        return _multiplied(graph, value, dim, weight)
    first_feature = 0
    results: list[Node] = []
    for source, its_dim in passage.sources:
        own_weight = weight
        if passage.splits:  # the features of this input, of those that are concatenated
            end = first_feature + int(sizes(source)[its_dim])
            own_weight = insert(graph, aten.slice.Tensor, weight, 1, first_feature, end)
            first_feature = end
        results.append(_applied(graph, source, its_dim, own_weight))
    return passage.rebuild(graph, results, int(sizes(weight)[0]))


def _multiplied(graph: Graph, value: Node, dim: int, weight: Node) -> Node:
    """Apply `weight`, (outputs, features), along `dim` of `value` itself."""
    rank = len(sizes(value))
    if dim == rank - 1:
        return insert(graph, aten.linear.default, value, weight)
    if dim == 0 and rank == 2:
        return insert(graph, aten.mm.default, weight, value)
    if dim == 1 and rank in (3, 4):
        kernel = [int(size) for size in sizes(weight)] + [1] * (rank - 2)
        shaped = insert(graph, aten.reshape.default, weight, kernel)
        convolution = aten.conv1d.default if rank == 3 else aten.conv2d.default
        return insert(graph, convolution, value, shaped)
    turned = insert(graph, aten.transpose.int, value, dim, rank - 1)
    product = insert(graph, aten.linear.default, turned, weight)
    return insert(graph, aten.transpose.int, product, dim, rank - 1)


@dataclass(frozen=True)
class _Passage:
    """An operation for which a linear layer may be applied to its inputs instead of its result.

    `sources`: its inputs, each with its dimension of features. `splits`: the inputs are
    concatenated along the features. `rebuild(graph, results, features)` repeats the operation on
    the results of the layer, which have `features` features.
    """

    sources: tuple[tuple[Node, int], ...]
    rebuild: Callable[[Graph, list[Node], int], Node]
    splits: bool = False


def _passage(value: Node, dim: int) -> _Passage | None:
    """How a layer along `dim` passes the operation that makes `value`; None if it cannot."""
    if value.op != "call_function" or value.kwargs.keys() - {"memory_format"}:
        return None
    make = _PASSAGES.get(value.target)
    return make(value, dim) if make is not None else None


def _one_input(value: Node, dim: int, shape: Any = None, at: int = 0) -> _Passage:
    """A passage with one input, the first argument, whose features lie along `dim`. `shape`: the
    second argument if it is a shape; `rebuild` puts the number of features at its index `at`."""
    target: Any = value.target

    def rebuild(graph: Graph, results: list[Node], features: int) -> Node:
        others = value.args[1:] if shape is None else ([*shape[:at], features, *shape[at + 1 :]],)
        return insert(graph, target, results[0], *others)

    return _Passage(((as_node(value.args[0]), dim),), rebuild)


def _transpose(value: Node, dim: int) -> _Passage:
    """An exchange of two dimensions."""
    exchanged: Any = value.args[1:3]
    first, second = (int(number) % len(sizes(value)) for number in exchanged)
    return _one_input(value, {first: second, second: first}.get(dim, dim))


def _permute(value: Node, dim: int) -> _Passage:
    """A permutation: dimension `dim` of the result is dimension `order[dim]` of the input."""
    order: Any = value.args[1]
    return _one_input(value, int(order[dim]) % len(order))


def _view(value: Node, dim: int) -> _Passage | None:
    """A view, if its input has one dimension that holds exactly the features, else None."""
    before, after = sizes(value.args[0]), sizes(value)
    same = [
        d
        for d, size in enumerate(before)
        if size == after[dim]
        and math.prod(before[:d]) == math.prod(after[:dim])
        and math.prod(before[d + 1 :]) == math.prod(after[dim + 1 :])
    ]
    return _one_input(value, same[0], value.args[1], dim) if len(same) == 1 else None


def _repeat(value: Node, dim: int) -> _Passage | None:
    """A repetition along other dimensions than the features', else None."""
    repeats: Any = value.args[1]
    added = len(repeats) - len(sizes(value.args[0]))
    return _one_input(value, dim - added) if dim >= added and repeats[dim] == 1 else None


def _expand(value: Node, dim: int) -> _Passage | None:
    """An expansion of other dimensions than the features', else None."""
    before, after = sizes(value.args[0]), sizes(value)
    added = len(after) - len(before)
    if dim < added or before[dim - added] != after[dim]:
        return None
    return _one_input(value, dim - added, value.args[1], dim)


def _index_select(value: Node, dim: int) -> _Passage | None:
    """A selection along another dimension than the features', else None."""
    selected_dim: Any = value.args[1]
    if int(selected_dim) % len(sizes(value)) == dim:
        return None
    return _one_input(value, dim)


def _index(value: Node, dim: int) -> _Passage | None:
    """An index with one tensor, along a dimension that is not the features', else None."""
    indices: Any = value.args[1]
    dims = [d for d, index in enumerate(indices) if index is not None]
    if len(dims) != 1 or indices[dims[0]].meta["val"].dtype is torch.bool:
        return None
    # In the result, the dimensions of the index tensor replace the indexed dimension.
    first = dims[0]
    added = len(sizes(indices[first])) - 1
    if first <= dim <= first + added:
        return None
    return _one_input(value, dim if dim < first else dim - added)


def _sum(value: Node, dim: int) -> _Passage | None:
    """A sum or difference of two values of the same rank and number of features, else None."""
    if len(value.args) != 2 or not all(isinstance(term, Node) for term in value.args):
        return None
    terms = [as_node(term) for term in value.args]
    rank, features = len(sizes(value)), sizes(value)[dim]
    if any(len(sizes(term)) != rank or sizes(term)[dim] != features for term in terms):
        return None
    target: Any = value.target
    return _Passage(
        tuple((term, dim) for term in terms),
        lambda graph, results, features: insert(graph, target, *results),
    )


def _cat(value: Node, dim: int) -> _Passage | None:
    """A concatenation of features, else None. The layer is the sum of a layer for each input."""
    joined: Any = value.args[0]
    joined_dim: Any = value.args[1] if len(value.args) > 1 else 0
    if int(joined_dim) % len(sizes(value)) != dim:
        return None

    def rebuild(graph: Graph, results: list[Node], features: int) -> Node:
        total, *others = results
        for result in others:
            total = insert(graph, aten.add.Tensor, total, result)
        return total

    return _Passage(tuple((source, dim) for source in joined), rebuild, splits=True)


_PASSAGES: dict[Any, Callable[[Node, int], _Passage | None]] = {
    aten.clone.default: _one_input,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.repeat.default: _repeat,
    aten.expand.default: _expand,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    aten.cat.default: _cat,
}


def _fewest_multiplications(value: Node, dim: int) -> float:
    """The least number of multiplications for a layer with one output along `dim` of a value."""
    passage = _passage(value, dim)
    here = _multiplications(value)
    if passage is None:
        return here
    return min(here, sum(_fewest_multiplications(*source) for source in passage.sources))


def _multiplications(value: Node) -> float:
    """The number of multiplications for a layer with one output on the value itself: one for each
    element."""
    return math.prod(_extent(size) for size in value.meta["val"].shape)


def _extent(size: Any) -> float:
    """A size as a number: for a symbolic size its largest value, or the least if unbounded."""
    if isinstance(size, int):
        return size
    least, largest = bounds(size)
    return max(least if largest is None else largest, 1)
