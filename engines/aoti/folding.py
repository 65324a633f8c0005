"""Linear layers on inputs of three or more dimensions, as one matrix product.

For an input of shape (n, particles, features) whose memory is laid out in columns, and for weights
without gradient, torch computes one product for each particle. Reshaped to (n * particles,
features), the input is one matrix, and the layer is one product.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from engines.exported import insert, sizes

aten = torch.ops.aten


def fold_linear(program: ExportedProgram) -> None:
    """Reshape the input of linear layers to a matrix; changes the program in place.

    Only the first dimension of such an input may have a size that is not known.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is not aten.linear.default:
            continue
        source, *weight_and_bias = node.args
        inner, shape = sizes(source), sizes(node)
        if len(inner) < 3 or not all(isinstance(size, int) for size in shape[1:]):
            continue  # the result is reshaped to `shape`, of which one size may be left to torch
        with graph.inserting_before(node):
            matrix = insert(graph, aten.reshape.default, source, [-1, inner[-1]])
            product = insert(graph, aten.linear.default, matrix, *weight_and_bias)
            linear = insert(graph, aten.reshape.default, product, [-1, *shape[1:]])
        node.replace_all_uses_with(linear)
    graph.eliminate_dead_code()
    graph.lint()
