"""Makes a linear layer on an input of three or more dimensions one matrix product.

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
    """Reshape the inputs of linear layers to matrices, and the results back. Changes the program in
    place.

    A layer stays as it is if its input has fewer than three dimensions, or if the size of another
    dimension than the first is not known.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is not aten.linear.default:
            continue
        source, *weight_and_bias = node.args
        source_shape, shape = sizes(source), sizes(node)
        if len(source_shape) < 3 or not all(isinstance(size, int) for size in shape[1:]):
            continue  # the result is reshaped to `shape`, of which one size may be left to torch
        with graph.inserting_before(node):
            matrix = insert(graph, aten.reshape.default, source, [-1, source_shape[-1]])
            product = insert(graph, aten.linear.default, matrix, *weight_and_bias)
            linear = insert(graph, aten.reshape.default, product, [-1, *shape[1:]])
        node.replace_all_uses_with(linear)
    graph.eliminate_dead_code()
    graph.lint()
