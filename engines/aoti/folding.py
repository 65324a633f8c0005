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
    """Reshape the input of every linear layer to a matrix; changes the program in place."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is not aten.linear.default:
            continue
        given, *layer = node.args
        before, after = sizes(given), sizes(node)
        if len(before) < 3 or not all(isinstance(size, int) for size in after[1:]):
            continue
        with graph.inserting_before(node):
            flat = insert(graph, aten.reshape.default, given, [-1, before[-1]])
            linear = insert(graph, aten.linear.default, flat, *layer)
            shape = [-1, *after[1:]]
            linear = insert(graph, aten.reshape.default, linear, shape)
        node.replace_all_uses_with(linear)
    graph.eliminate_dead_code()
    graph.lint()
