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
_ABSENT: tuple[Any, ...] = (None, None, None, [1], [0], [1], 1)

# A move changes the rounding. So a layer is moved only if at most this part of its multiplications
# is left.
_WORTH = 0.8


@dataclass(frozen=True)
class _Layer:
    """A linear layer on the input `given`, whose features lie along `dim`."""

    given: Node
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
        if _cost(layer.given, layer.dim) > _WORTH * _direct(layer.given, layer.dim):
            continue
        with graph.inserting_before(node):
            _replace(graph, node, layer)
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
            turned = insert(graph, aten.permute.default, layer.given, [0, *range(2, rank), 1])
            linear = insert(graph, aten.linear.default, turned, weight, layer.bias)
            linear = insert(graph, aten.permute.default, linear, [0, rank - 1, *range(1, rank - 1)])
        node.replace_all_uses_with(linear)
    graph.eliminate_dead_code()
    graph.lint()


def _layer(node: Node) -> _Layer | None:
    """The layer, if the node is a linear layer or a convolution with kernel size 1, else None."""
    given: Any
    weight: Any
    arguments: tuple[Any, ...] = node.args
    if node.target is aten.linear.default:
        given, weight, bias = (*arguments, None)[:3]
        return _Layer(given, len(sizes(given)) - 1, weight, bias)
    if node.target not in (aten.conv1d.default, aten.conv2d.default):
        return None
    given, weight, bias, stride, padding, _, groups = (*arguments, *_ABSENT[len(arguments) :])
    one_place = set(sizes(weight)[2:]) == {1} and set(stride) == {1} and set(padding) == {0}
    if not one_place or groups != 1 or len(sizes(given)) != len(sizes(weight)):
        return None
    return _Layer(given, 1, weight, bias)


def _replace(graph: Graph, node: Node, layer: _Layer) -> None:
    """Put a product of matrices, in place, where `node` computes the layer."""
    out, features = (int(size) for size in sizes(layer.weight)[:2])
    weight = layer.weight
    if len(sizes(weight)) > 2:
        weight = insert(graph, aten.reshape.default, weight, [out, features])
    product = _applied(graph, layer.given, layer.dim, weight)
    if layer.bias is not None:
        after = len(sizes(layer.given)) - 1 - layer.dim
        bias = insert(graph, aten.reshape.default, layer.bias, [out] + [1] * after)
        product = insert(graph, aten.add.Tensor, product, bias)
    node.replace_all_uses_with(product)


def _applied(graph: Graph, value: Node, dim: int, weight: Node) -> Node:
    """Apply `weight` along `dim` of `value`, as far in front of `value` as it saves work."""
    step = _step(value, dim)
    if step is None or _cost(value, dim) >= _direct(value, dim):
        return _multiplied(graph, value, dim, weight)
    at = 0
    parts: list[Node] = []
    for before, its_dim in step.parts:
        part = weight
        if step.splits:
            width = int(sizes(before)[its_dim])
            part = insert(graph, aten.slice.Tensor, weight, 1, at, at + width)
            at += width
        parts.append(_applied(graph, before, its_dim, part))
    return step.rebuild(graph, parts, int(sizes(weight)[0]))


def _multiplied(graph: Graph, value: Node, dim: int, weight: Node) -> Node:
    """Apply `weight` along `dim` of `value` itself."""
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
class _Step:
    """An operation for which a linear layer may be applied to its inputs instead of its result.

    `parts`: its inputs, each with its dimension of features. `splits`: the inputs are concatenated
    along the features. `rebuild(graph, parts, features)` repeats the operation on other inputs,
    which have `features` features.
    """

    parts: tuple[tuple[Node, int], ...]
    rebuild: Callable[[Graph, list[Node], int], Node]
    splits: bool = False


def _step(value: Node, dim: int) -> _Step | None:
    if value.op != "call_function" or value.kwargs.keys() - {"memory_format"}:
        return None
    make = _STEPS.get(value.target)
    return make(value, dim) if make is not None else None


def _again(value: Node, dim: int, shape: Any = None, at: int = 0) -> _Step:
    """A step with one input, the first argument, whose features lie along `dim`. `shape`: the
    second argument if it is a shape; `rebuild` puts the number of features at its index `at`."""
    target: Any = value.target

    def rebuild(graph: Graph, parts: list[Node], features: int) -> Node:
        rest = value.args[1:] if shape is None else ([*shape[:at], features, *shape[at + 1 :]],)
        return insert(graph, target, parts[0], *rest)

    return _Step(((as_node(value.args[0]), dim),), rebuild)


def _transpose(value: Node, dim: int) -> _Step:
    dims: Any = value.args[1:3]
    first, second = (int(d) % len(sizes(value)) for d in dims)
    return _again(value, {first: second, second: first}.get(dim, dim))


def _permute(value: Node, dim: int) -> _Step:
    order: Any = value.args[1]
    return _again(value, int(order[dim]) % len(order))


def _view(value: Node, dim: int) -> _Step | None:
    """A view, if its input has one dimension that holds exactly the features, else None."""
    before, after = sizes(value.args[0]), sizes(value)
    same = [
        d
        for d, size in enumerate(before)
        if size == after[dim]
        and math.prod(before[:d]) == math.prod(after[:dim])
        and math.prod(before[d + 1 :]) == math.prod(after[dim + 1 :])
    ]
    return _again(value, same[0], value.args[1], dim) if len(same) == 1 else None


def _repeat(value: Node, dim: int) -> _Step | None:
    repeats: Any = value.args[1]
    added = len(repeats) - len(sizes(value.args[0]))
    return _again(value, dim - added) if dim >= added and repeats[dim] == 1 else None


def _expand(value: Node, dim: int) -> _Step | None:
    before, after = sizes(value.args[0]), sizes(value)
    added = len(after) - len(before)
    if dim < added or before[dim - added] != after[dim]:
        return None
    return _again(value, dim - added, value.args[1], dim)


def _index_select(value: Node, dim: int) -> _Step | None:
    chosen: Any = value.args[1]
    return _again(value, dim) if int(chosen) % len(sizes(value)) != dim else None


def _index(value: Node, dim: int) -> _Step | None:
    """An index with one tensor, along a dimension that is not the features', else None."""
    indices: Any = value.args[1]
    given = [(d, index) for d, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].meta["val"].dtype is torch.bool:
        return None
    at, index = given[0]
    added = len(sizes(index)) - 1
    if at <= dim <= at + added:
        return None
    return _again(value, dim if dim < at else dim - added)


def _sum(value: Node, dim: int) -> _Step | None:
    """A sum or difference of two values of the same rank and number of features, else None."""
    if len(value.args) != 2 or not all(isinstance(part, Node) for part in value.args):
        return None
    parts = [as_node(part) for part in value.args]
    rank = len(sizes(value))
    if any(len(sizes(p)) != rank or sizes(p)[dim] != sizes(value)[dim] for p in parts):
        return None
    target: Any = value.target
    return _Step(
        tuple((part, dim) for part in parts),
        lambda graph, made, features: insert(graph, target, *made),
    )


def _cat(value: Node, dim: int) -> _Step | None:
    """A concatenation of features. The layer of the whole is the sum of a layer for each part."""
    parts: Any = value.args[0]
    along: Any = value.args[1] if len(value.args) > 1 else 0
    if int(along) % len(sizes(value)) != dim:
        return None

    def rebuild(graph: Graph, made: list[Node], features: int) -> Node:
        total, *others = made
        for part in others:
            total = insert(graph, aten.add.Tensor, total, part)
        return total

    return _Step(tuple((part, dim) for part in parts), rebuild, splits=True)


_STEPS: dict[Any, Callable[[Node, int], _Step | None]] = {
    aten.clone.default: _again,
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


def _cost(value: Node, dim: int) -> float:
    """The least number of multiplications for a layer with one output along `dim` of a value."""
    step = _step(value, dim)
    if step is None:
        return _direct(value, dim)
    return min(_direct(value, dim), sum(_cost(part, its_dim) for part, its_dim in step.parts))


def _direct(value: Node, dim: int) -> float:
    return math.prod(_extent(size) for size in value.meta["val"].shape)


def _extent(size: Any) -> float:
    """A size as a number: for a symbolic size its largest value, or the least if unbounded."""
    least, largest = bounds(size)
    return size if isinstance(size, int) else max(least if largest is None else largest, 1)
