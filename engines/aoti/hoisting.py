"""Linear layers moved in front of the gathers and repeats that feed them.

A graph network applies a layer to every edge: to `cat([x[i], x[j] - x[i]])`, say, of the k
neighbours of each point. The layer is linear, and gathering, repeating and concatenating only
rearrange rows. So it may as well be applied to the points, k times fewer, and its answers gathered:
the same numbers but for the order of rounding, for a part of the work. A layer is moved where that
makes it smaller, and as far as that makes it smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.utils._sympy.numbers import int_oo

aten = torch.ops.aten

# Arguments of a convolution that are not given.
_ABSENT: tuple[Any, ...] = (None, None, None, [1], [0], [1], 1)

_WORTH = 0.8  # of the multiplications: less is not worth another order of rounding


@dataclass(frozen=True)
class _Layer:
    """What a linear layer does to its input: features along `dim`, a weight, maybe a bias."""

    given: Node
    dim: int
    weight: Node
    bias: Node | None


def hoist_linear(program: ExportedProgram) -> int:
    """Move what is worth it, in place; how many layers that were."""
    graph = program.graph_module.graph
    moved = 0
    for node in list(graph.nodes):
        layer = _layer(node)
        if layer is None or _cost(layer.given, layer.dim) > _WORTH * _direct(
            layer.given, layer.dim
        ):
            continue
        with graph.inserting_before(node):
            _replace(graph, node, layer)
        moved += 1
    if moved:
        graph.eliminate_dead_code()
        graph.lint()
    return moved


def _layer(node: Node) -> _Layer | None:
    """A linear layer, or a convolution that looks at one place at a time; None for all else."""
    given: Any
    weight: Any
    arguments: tuple[Any, ...] = node.args
    if node.target is aten.linear.default:
        given, weight, bias = (*arguments, None)[:3]
        return _Layer(given, len(_sizes(given)) - 1, weight, bias)
    if node.target not in (aten.conv1d.default, aten.conv2d.default):
        return None
    given, weight, bias, stride, padding, _, groups = (*arguments, *_ABSENT[len(arguments) :])
    one_place = set(_sizes(weight)[2:]) == {1} and set(stride) == {1} and set(padding) == {0}
    if not one_place or groups != 1 or len(_sizes(given)) != len(_sizes(weight)):
        return None
    return _Layer(given, 1, weight, bias)


def _replace(graph: Graph, node: Node, layer: _Layer) -> None:
    out, features = (int(size) for size in _sizes(layer.weight)[:2])
    weight = layer.weight
    if len(_sizes(weight)) > 2:
        weight = _insert(graph, aten.reshape.default, weight, [out, features])
    made = _applied(graph, layer.given, layer.dim, weight)
    if layer.bias is not None:
        after = len(_sizes(layer.given)) - 1 - layer.dim
        bias = _insert(graph, aten.reshape.default, layer.bias, [out] + [1] * after)
        made = _insert(graph, aten.add.Tensor, made, bias)
    node.replace_all_uses_with(made)


def _applied(graph: Graph, value: Node, dim: int, weight: Node) -> Node:
    """`weight` applied along `dim` of `value`, as early as it pays."""
    step = _step(value, dim)
    if step is None or _cost(value, dim) >= _direct(value, dim):
        return _multiplied(graph, value, dim, weight)
    at = 0
    parts: list[Node] = []
    for before, its_dim in step.parts:
        part = weight
        if step.splits:
            width = int(_sizes(before)[its_dim])
            part = _insert(graph, aten.slice.Tensor, weight, 1, at, at + width)
            at += width
        parts.append(_applied(graph, before, its_dim, part))
    return step.rebuild(graph, parts, int(_sizes(weight)[0]))


def _multiplied(graph: Graph, value: Node, dim: int, weight: Node) -> Node:
    """`weight` along `dim` of a value, here and now."""
    sizes = _sizes(value)
    if dim == len(sizes) - 1:
        return _insert(graph, aten.linear.default, value, weight)
    if dim == 0 and len(sizes) == 2:
        return _insert(graph, aten.mm.default, weight, value)
    if dim == 1 and len(sizes) in (3, 4):
        out, features = _sizes(weight)
        kernel = [1] * (len(sizes) - 2)
        shaped = _insert(graph, aten.reshape.default, weight, [int(out), int(features), *kernel])
        convolution = aten.conv1d.default if len(sizes) == 3 else aten.conv2d.default
        return _insert(graph, convolution, value, shaped)
    last = len(sizes) - 1
    turned = _insert(graph, aten.transpose.int, value, dim, last)
    return _insert(
        graph, aten.transpose.int, _insert(graph, aten.linear.default, turned, weight), dim, last
    )


@dataclass(frozen=True)
class _Step:
    """How a value comes from others, where a linear layer along a dimension may go before it.

    `parts` are the others, each with its own dimension of features; `splits`: these are parts of
    the features, side by side. `rebuild(graph, parts, features)` does the step on other parts.
    """

    parts: tuple[tuple[Node, int], ...]
    rebuild: Callable[[Graph, list[Node], int], Node]
    splits: bool = False


def _step(value: Node, dim: int) -> _Step | None:
    if value.op != "call_function" or value.kwargs.keys() - {"memory_format"}:
        return None
    make = _STEPS.get(value.target)
    return make(value, dim) if make is not None else None


def _again(value: Node, dim: int, change: Callable[[int], tuple[Any, ...]] | None = None) -> _Step:
    """The same step on its first argument; `change(features)` gives the arguments that follow."""
    target: Any = value.target

    def rebuild(graph: Graph, parts: list[Node], features: int) -> Node:
        rest = value.args[1:] if change is None else change(features)
        return _insert(graph, target, parts[0], *rest)

    return _Step(((_node(value.args[0]), dim),), rebuild)


def _clone(value: Node, dim: int) -> _Step:
    return _again(value, dim)


def _transpose(value: Node, dim: int) -> _Step:
    rank = len(_sizes(value))
    dims: Any = value.args[1:3]
    first, second = (int(d) % rank for d in dims)
    return _again(value, {first: second, second: first}.get(dim, dim))


def _permute(value: Node, dim: int) -> _Step:
    order: Any = value.args[1]
    return _again(value, int(order[dim]) % len(order))


def _view(value: Node, dim: int) -> _Step | None:
    """A view that leaves the features a dimension of their own."""
    before, after = _sizes(value.args[0]), _sizes(value)
    found = [
        d
        for d, size in enumerate(before)
        if size == after[dim]
        and _same(before[:d], after[:dim])
        and _same(before[d + 1 :], after[dim + 1 :])
    ]
    if len(found) != 1:
        return None
    shape: Any = value.args[1]

    def change(features: int) -> tuple[Any, ...]:
        return ([*shape[:dim], features, *shape[dim + 1 :]],)

    return _again(value, found[0], change)


def _repeat(value: Node, dim: int) -> _Step | None:
    repeats: Any = value.args[1]
    added = len(repeats) - len(_sizes(value.args[0]))
    return _again(value, dim - added) if dim >= added and repeats[dim] == 1 else None


def _expand(value: Node, dim: int) -> _Step | None:
    shape: Any = value.args[1]
    before = _sizes(value.args[0])
    added = len(_sizes(value)) - len(before)
    if dim < added or before[dim - added] != _sizes(value)[dim]:
        return None

    def change(features: int) -> tuple[Any, ...]:
        return ([*shape[:dim], features, *shape[dim + 1 :]],)

    return _again(value, dim - added, change)


def _index_select(value: Node, dim: int) -> _Step | None:
    chosen: Any = value.args[1]
    return _again(value, dim) if int(chosen) % len(_sizes(value)) != dim else None


def _index(value: Node, dim: int) -> _Step | None:
    """Rows picked by one tensor of indices along a dimension that is not the features'."""
    indices: Any = value.args[1]
    given = [(d, index) for d, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].meta["val"].dtype is torch.bool:
        return None
    at, index = given[0]
    added = len(_sizes(index)) - 1
    if at <= dim <= at + added:
        return None
    return _again(value, dim if dim < at else dim - added)


def _sum(value: Node, dim: int) -> _Step | None:
    """A sum or difference of values that all have these features."""
    if len(value.args) != 2 or not all(isinstance(part, Node) for part in value.args):
        return None
    parts = [_node(part) for part in value.args]
    rank = len(_sizes(value))
    if any(len(_sizes(p)) != rank or _sizes(p)[dim] != _sizes(value)[dim] for p in parts):
        return None
    target: Any = value.target
    return _Step(
        tuple((part, dim) for part in parts),
        lambda graph, made, features: _insert(graph, target, *made),
    )


def _cat(value: Node, dim: int) -> _Step | None:
    """Features side by side: the sum of a layer for each."""
    parts: Any = value.args[0]
    along: Any = value.args[1] if len(value.args) > 1 else 0
    if int(along) % len(_sizes(value)) != dim:
        return None

    def rebuild(graph: Graph, made: list[Node], features: int) -> Node:
        total, *others = made
        for part in others:
            total = _insert(graph, aten.add.Tensor, total, part)
        return total

    return _Step(tuple((part, dim) for part in parts), rebuild, splits=True)


_STEPS: dict[Any, Callable[[Node, int], _Step | None]] = {
    aten.clone.default: _clone,
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
    """Multiplications of a layer with one output along `dim` of a value, done as early as pays."""
    step = _step(value, dim)
    if step is None:
        return _direct(value, dim)
    return min(_direct(value, dim), sum(_cost(part, its_dim) for part, its_dim in step.parts))


def _direct(value: Node, dim: int) -> float:
    return math.prod(_extent(size) for size in value.meta["val"].shape)


def _extent(size: Any) -> float:
    """A size at the largest row counts that the program is for, which show how they compare."""
    if isinstance(size, int):
        return size
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return max(float(bounds.lower if bounds.upper is int_oo else bounds.upper), 1.0)


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether sizes hold as many elements; expressions are compared without adding a guard."""
    return bool(math.prod(one) == math.prod(other))


def _insert(graph: Graph, function: Any, *args: Any) -> Node:
    """A new step, with the shape and dtype of its value."""
    node = graph.call_function(function, args)
    node.meta["val"] = function(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
    return node


def _node(argument: Any) -> Node:
    assert isinstance(argument, Node)
    return argument


def _sizes(node: Any) -> tuple[Any, ...]:
    """A tensor's sizes: ints, and expressions that can be compared without adding a guard."""
    return tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in node.meta["val"].shape)
