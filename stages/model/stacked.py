"""Exports the columns of a block as one tensor, and puts the columns back into the graph.

torch.export takes some 40 ms for each argument. So the columns of a block are exported as the
tensor that they are stacked to; then its placeholder is replaced by one for each column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten

from soa.signature import Signature

aten = torch.ops.aten


@dataclass(frozen=True)
class Stack:
    """An input block whose columns are exported as one tensor. `block` is its index; its columns
    are the `count` arguments from the argument `first` on."""

    block: int
    first: int
    count: int


def stacks_of(signature: Signature) -> list[Stack]:
    """The input blocks to export as one tensor each, in order: those that have several columns,
    none of which is cast."""
    stacks: list[Stack] = []
    position = len(signature.dims)
    for i, bound in enumerate(signature.inputs):
        count = 1 if bound.plan.kind == "matrix" else len(bound.plan.components)
        dtypes = {argument.dtype for argument in signature.arguments[position : position + count]}
        if bound.plan.kind == "columns" and count > 1 and dtypes == {bound.plan.dtype}:
            stacks.append(Stack(i, position, count))
        position += count
    return stacks


def stack_arguments(
    arguments: Sequence[Any], stacks: Sequence[Stack], join: Callable[[list[Any]], Any]
) -> list[Any]:
    """A copy of the list in which `join(columns)` replaces the columns of each stack.

    `arguments` has one entry for each argument: the tensors, or other values such as their shapes.
    `stacks` are in order.
    """
    stacked = list(arguments)
    for stack in reversed(stacks):  # from the end, so that the positions of the others stay
        end = stack.first + stack.count
        stacked[stack.first : end] = [join(stacked[stack.first : end])]
    return stacked


def restore_columns(
    program: ExportedProgram, stacks: Sequence[Stack], arguments: Sequence[torch.Tensor]
) -> ExportedProgram:
    """Give a program one argument for each column again, in place of one for each stack.

    Its graph is changed in place; the program that is returned describes the new arguments.
    `arguments` are those of the example, one for each column.
    """
    if not stacks:
        return program
    graph, signature = program.graph, program.graph_signature
    nodes = {node.name: node for node in graph.find_nodes(op="placeholder")}
    places = stack_arguments(range(len(arguments)), stacks, lambda columns: columns[0])
    name_of = dict(zip(places, signature.user_inputs, strict=True))
    columns: dict[str, list[str]] = {}  # by the name of the stack that they replace
    for stack in stacks:
        name = str(name_of[stack.first])
        columns[name] = _replace_by_columns(graph, nodes[name], stack)
    specs: list[InputSpec] = []
    for spec in signature.input_specs:
        names = columns.get(getattr(spec.arg, "name", ""))
        if names is None:
            specs.append(spec)
        else:
            specs += [InputSpec(InputKind.USER_INPUT, TensorArgument(name), None) for name in names]
    graph.lint()
    program.graph_module.recompile()
    return _replace_inputs(program, specs, arguments)


def _replace_inputs(
    program: ExportedProgram, specs: list[InputSpec], arguments: Sequence[torch.Tensor]
) -> ExportedProgram:
    """A program with the same graph, whose records of its inputs fit the graph again. `specs`
    describe the inputs, and `arguments` are the example."""
    entry, *others = program.module_call_graph
    assert entry.signature is not None
    inputs = [spec.arg for spec in specs if spec.kind is InputKind.USER_INPUT]
    called = replace(
        entry.signature,
        inputs=inputs,
        in_spec=tree_flatten((tuple(arguments), {}))[1],
        forward_arg_names=[argument.name for argument in inputs],
    )
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=replace(program.graph_signature, input_specs=specs),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=[replace(entry, signature=called), *others],
        example_inputs=(tuple(arguments), {}),
        constants=program.constants,
        verifiers=[program.verifier],
    )


def _replace_by_columns(graph: Graph, placeholder: Node, stack: Stack) -> list[str]:
    """Replace the placeholder of a stack by one for each column, and a node that stacks these.
    Returns the names of the new placeholders. The graph is changed in place."""
    value = placeholder.meta["val"]
    columns: list[Node] = []
    with graph.inserting_before(placeholder):
        for i in range(stack.count):
            column = graph.placeholder(f"arguments_{stack.first}_{i}")
            column.meta["val"] = value.new_empty(value.shape[:1])
            columns.append(column)
    body = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(body):
        stacked = graph.call_function(aten.stack.default, (columns, 1))
        stacked.meta["val"] = value
    placeholder.replace_all_uses_with(stacked)
    graph.erase_node(placeholder)
    return [column.name for column in columns]
