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
_LARGEST_REMAINDER = 0.8


@dataclass(frozen=True)
class _Layer:
    """A linear layer on `source`, whose features lie along dimension `dim`.

    `weight` has shape (outputs, features). For a convolution, more sizes follow, all 1.
    """

    source: Node
    dim: int
    weight: Node
    bias: Node | None


def hoist_linear(program: ExportedProgram) -> int:
    """Move the linear layers of a program forward where that saves enough work. Changes the program
    in place. Returns the number of layers that were moved."""
    graph = program.graph_module.graph
    moved = 0
    for node in list(graph.nodes):
        layer = _as_layer(node)
        if layer is None:
            continue
        at_best = _fewest_multiplications(layer.source, layer.dim)
        if at_best > _LARGEST_REMAINDER * _multiplications(layer.source):
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(_hoist(graph, layer))
        moved += 1
    if moved:
        graph.eliminate_dead_code()
        graph.lint()
    return moved


def replace_pointwise_convolutions(program: ExportedProgram) -> None:
    """Replace each convolution with kernel size 1 by a linear layer. Changes the program in place.

    The features become the last dimension, so that the positions of all rows form one matrix.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        layer = _as_layer(node)
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


def _as_layer(node: Node) -> _Layer | None:
    """Describe a node as a layer if it is a linear layer or a convolution with kernel size 1.
    Returns None for any other node."""
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
    pointwise = set(sizes(weight)[2:]) == {1} and set(stride) == {1} and set(padding) == {0}
    if not pointwise or groups != 1 or len(sizes(source)) != len(sizes(weight)):
        return None  # it has other kernels or groups, or its input has no dimension of a batch
    return _Layer(source, 1, weight, bias)


def _hoist(graph: Graph, layer: _Layer) -> Node:
    """Compute the layer anew, as far forward in the graph as it saves work. Returns the node of its
    result."""
    outputs, features = (int(size) for size in sizes(layer.weight)[:2])
    weight = layer.weight
    if len(sizes(weight)) > 2:
        weight = insert(graph, aten.reshape.default, weight, [outputs, features])
    product = _apply_early(graph, layer.source, layer.dim, weight)
    if layer.bias is None:
        return product
    dims_behind = len(sizes(layer.source)) - 1 - layer.dim
    bias = insert(graph, aten.reshape.default, layer.bias, [outputs] + [1] * dims_behind)
    return insert(graph, aten.add.Tensor, product, bias)


def _apply_early(graph: Graph, value: Node, dim: int, weight: Node) -> Node:
    """Multiply `value` along `dim` by `weight`, of shape (outputs, features), and return the node
    of the product. The multiplication is done on the nodes from which `value` is made, as far in
    front of it as that saves work."""
    passage = _find_passage(value, dim)
    if passage is None or _fewest_multiplications(value, dim) >= _multiplications(value):
        return _multiply(graph, value, dim, weight)
    first_feature = 0
    results: list[Node] = []
    for source, source_dim in passage.sources:
        own_weight = weight
        if passage.splits:  # the features of this input, of those that are concatenated
            end = first_feature + int(sizes(source)[source_dim])
            own_weight = insert(graph, aten.slice.Tensor, weight, 1, first_feature, end)
            first_feature = end
        results.append(_apply_early(graph, source, source_dim, own_weight))
    return passage.rebuild(graph, results, int(sizes(weight)[0]))


def _multiply(graph: Graph, value: Node, dim: int, weight: Node) -> Node:
    """Multiply `value` itself along `dim` by `weight`, of shape (outputs, features), with the
    operator that fits the dimension: a linear layer, a product of matrices or a convolution."""
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
    """How a linear layer moves from the result of an operation to the operation's inputs.

    `sources` are the inputs, each with its dimension of features. `splits` is true if the operation
    concatenates them along the features, so that each input gets a part of the layer's weights.
    `rebuild(graph, results, features)` repeats the operation on the results of the layer, which
    have `features` features.
    """

    sources: tuple[tuple[Node, int], ...]
    rebuild: Callable[[Graph, list[Node], int], Node]
    splits: bool = False


def _find_passage(value: Node, dim: int) -> _Passage | None:
    """How a layer along `dim` of `value` passes the operation that makes `value`. None if it
    cannot."""
    if value.op != "call_function" or value.kwargs.keys() - {"memory_format"}:
        return None
    make = _PASSAGES.get(value.target)
    return make(value, dim) if make is not None else None


def _pass_one_input(value: Node, dim: int, shape: Any = None, at: int = 0) -> _Passage:
    """The passage of an operation with one input, its first argument, whose features lie along
    `dim`.

    If the second argument is a shape, it is given as `shape`, and `rebuild` replaces its entry `at`
    by the number of features.
    """
    target: Any = value.target

    def rebuild(graph: Graph, results: list[Node], features: int) -> Node:
        others = value.args[1:] if shape is None else ([*shape[:at], features, *shape[at + 1 :]],)
        return insert(graph, target, results[0], *others)

    return _Passage(((as_node(value.args[0]), dim),), rebuild)


def _pass_transpose(value: Node, dim: int) -> _Passage:
    """The passage of an exchange of two dimensions."""
    exchanged: Any = value.args[1:3]
    one, other = (int(number) % len(sizes(value)) for number in exchanged)
    return _pass_one_input(value, {one: other, other: one}.get(dim, dim))


def _pass_permute(value: Node, dim: int) -> _Passage:
    """The passage of a permutation, in which dimension `dim` of the result is dimension
    `order[dim]` of the input."""
    order: Any = value.args[1]
    return _pass_one_input(value, int(order[dim]) % len(order))


def _pass_view(value: Node, dim: int) -> _Passage | None:
    """The passage of a view. None unless exactly one dimension of its input holds the same
    features."""
    before, after = sizes(value.args[0]), sizes(value)
    matching = [
        d
        for d, size in enumerate(before)
        if size == after[dim]
        and math.prod(before[:d]) == math.prod(after[:dim])
        and math.prod(before[d + 1 :]) == math.prod(after[dim + 1 :])
    ]
    return _pass_one_input(value, matching[0], value.args[1], dim) if len(matching) == 1 else None


def _pass_repeat(value: Node, dim: int) -> _Passage | None:
    """The passage of a repetition. None if it repeats the features."""
    repeats: Any = value.args[1]
    added = len(repeats) - len(sizes(value.args[0]))
    return _pass_one_input(value, dim - added) if dim >= added and repeats[dim] == 1 else None


def _pass_expand(value: Node, dim: int) -> _Passage | None:
    """The passage of an expansion. None if it expands the dimension of the features."""
    before, after = sizes(value.args[0]), sizes(value)
    added = len(after) - len(before)
    if dim < added or before[dim - added] != after[dim]:
        return None
    return _pass_one_input(value, dim - added, value.args[1], dim)


def _pass_index_select(value: Node, dim: int) -> _Passage | None:
    """The passage of a selection. None if it selects features."""
    selected_dim: Any = value.args[1]
    if int(selected_dim) % len(sizes(value)) == dim:
        return None
    return _pass_one_input(value, dim)


def _pass_index(value: Node, dim: int) -> _Passage | None:
    """The passage of an index with one tensor of integers. None for other indices, and if it
    selects features."""
    indices: Any = value.args[1]
    dims = [d for d, index in enumerate(indices) if index is not None]
    if len(dims) != 1 or indices[dims[0]].meta["val"].dtype is torch.bool:
        return None
    # In the result, the dimensions of the index tensor replace the indexed dimension.
    indexed_dim = dims[0]
    added = len(sizes(indices[indexed_dim])) - 1
    if indexed_dim <= dim <= indexed_dim + added:
        return None
    return _pass_one_input(value, dim if dim < indexed_dim else dim - added)


def _pass_sum(value: Node, dim: int) -> _Passage | None:
    """The passage of a sum or difference. None unless both terms have the same rank and the same
    number of features."""
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


def _pass_cat(value: Node, dim: int) -> _Passage | None:
    """The passage of a concatenation of features: the layer's result is the sum of the results of a
    smaller layer for each input. None if another dimension is concatenated."""
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
    aten.clone.default: _pass_one_input,
    aten.transpose.int: _pass_transpose,
    aten.permute.default: _pass_permute,
    aten.view.default: _pass_view,
    aten._unsafe_view.default: _pass_view,
    aten.reshape.default: _pass_view,
    aten.repeat.default: _pass_repeat,
    aten.expand.default: _pass_expand,
    aten.index_select.default: _pass_index_select,
    aten.index.Tensor: _pass_index,
    aten.add.Tensor: _pass_sum,
    aten.sub.Tensor: _pass_sum,
    aten.cat.default: _pass_cat,
}


def _fewest_multiplications(value: Node, dim: int) -> float:
    """The fewest multiplications for a layer with one output along `dim` of a value, if the layer
    is moved as far forward as it helps."""
    passage = _find_passage(value, dim)
    unmoved = _multiplications(value)
    if passage is None:
        return unmoved
    return min(unmoved, sum(_fewest_multiplications(*source) for source in passage.sources))


def _multiplications(value: Node) -> float:
    """The number of multiplications for a layer with one output that is applied to the value
    itself: one for each of its elements."""
    return math.prod(_extent(size) for size in value.meta["val"].shape)


def _extent(size: Any) -> float:
    """A size as a number. A symbolic size counts with its largest value, or with its least one if
    it has no bound."""
    if isinstance(size, int):
        return size
    least, largest = bounds(size)
    return max(least if largest is None else largest, 1)
