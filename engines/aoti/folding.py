"""Linear layers on rows of rows, as one matrix product.

Torch multiplies a layer of shape (n, particles, features) particle by particle where it lies in
memory as columns do, because the weights ask for no gradient. Laid side by side the rows are one
matrix, and the layer is one product with it.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from engines.exported import insert, sizes

aten = torch.ops.aten


def fold_linear(program: ExportedProgram) -> None:
    """Give every linear layer a matrix, in place."""
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
            made = insert(graph, aten.linear.default, flat, *layer)
            shape = [-1, *after[1:]]
            made = insert(graph, aten.reshape.default, made, shape)
        node.replace_all_uses_with(made)
    graph.eliminate_dead_code()
    graph.lint()
