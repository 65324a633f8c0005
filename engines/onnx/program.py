"""Rewrites an exported program in the calling convention for ONNX: it returns what it stored.

In ONNX a graph cannot write into given memory. So every column component that the program stores
becomes a separate, dense output with one element for each row. A runtime can then write it at the
component's address. The arguments that the program wrote are no longer inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from engines.errors import EngineError, NotApplicableError
from engines.exported import as_node, erase_checks, insert, sizes
from soa.records import as_record, parse_json

aten = torch.ops.aten

OUTPUTS = "soa.outputs"
"""The key in an ONNX file's metadata for the list of `Output` records, as JSON."""

# Operators that keep the order of elements in a tensor with only one dimension larger than 1.
_VIEWS = frozenset(
    [
        aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim,
        aten.squeeze.dims, aten.view.default, aten.reshape.default, aten._unsafe_view.default,
        aten.select.int, aten.clone.default,
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Output:
    """A tensor that the rewritten program returns: one component of an argument that the program
    wrote.

    `argument` is the index of that argument. `shape` is that of the returned tensor, in which -1
    stands for the row count of the argument with the index `rows` (None if no size is a row count).
    """

    argument: int
    component: int
    rows: int | None
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"argument_{self.argument}.{self.component}"


def read_outputs(text: str) -> list[Output]:
    """Read the list of outputs in an artifact's metadata. Raises EngineError if it is not valid."""
    try:
        return as_record(list[Output], parse_json(text))
    except ValueError as error:
        raise EngineError(f"its list of output columns cannot be read: {error}") from error


@dataclass(frozen=True)
class OnnxProgram:
    """A rewritten program. `inputs` has, for each of its arguments, the index that the argument had
    before."""

    program: ExportedProgram
    inputs: tuple[int, ...]
    outputs: tuple[Output, ...]


def input_name(argument: int) -> str:
    """The name of an argument, given by its index, as an input of the ONNX graph."""
    return f"argument_{argument}"


def return_columns(program: ExportedProgram) -> OnnxProgram:
    """Rewrite a program so that it returns the columns that it stored.

    `program` itself is changed and must not be used afterwards. Raises EngineError if it is not in
    the calling convention, and NotApplicableError if it stores something that ONNX cannot return.
    """
    graph, signature = program.graph_module.graph, program.graph_signature
    by_name = {node.name: node for node in graph.find_nodes(op="placeholder")}
    arguments = [
        by_name[spec.arg.name]
        for spec in signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]
    final = graph.output_node()
    outputs: list[Output] = []
    values: list[Node] = []  # one for each output, so that a value may occur twice
    with graph.inserting_before(final):
        for spec, stored in zip(signature.output_specs, final.args[0], strict=True):
            if spec.kind is not OutputKind.USER_INPUT_MUTATION:
                raise EngineError(f"the program returns {stored}: not in the calling convention")
            written = by_name[str(spec.target)]
            for component, value in enumerate(_split_into_components(graph, written, stored)):
                outputs.append(_describe_output(arguments, written, component, value))
                values.append(value)
    final.args = (tuple(values),)
    _remove_unused(graph, arguments, {output.argument for output in outputs})
    remaining = {node.name for node in graph.find_nodes(op="placeholder")}
    inputs = tuple(i for i, node in enumerate(arguments) if node.name in remaining)
    specs = [spec for spec in signature.input_specs if spec.arg.name in remaining]
    rewritten = _with_new_signature(program, specs, len(inputs), values)
    return OnnxProgram(rewritten, inputs, tuple(outputs))


def _with_new_signature(
    program: ExportedProgram, input_specs: list[InputSpec], inputs: int, returned: list[Node]
) -> ExportedProgram:
    """Make a program of the rewritten graph, with a signature that fits it.

    It takes `inputs` tensors and returns the values in `returned`. `input_specs` describes its
    arguments, and also its weights and constants.
    """
    output_specs = [
        OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(value.name), target=None)
        for value in returned
    ]
    return ExportedProgram(
        program.graph_module,
        program.graph_module.graph,
        ExportGraphSignature(input_specs, output_specs),
        program.state_dict,
        program.range_constraints,
        [_make_call_entry(inputs, len(returned))],
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _make_call_entry(inputs: int, outputs: int) -> ModuleCallEntry:
    """Describe to torch that the program takes a tuple of `inputs` tensors and returns a tuple of
    `outputs` tensors."""
    taken = pytree.tree_structure((tuple(range(inputs)), {}))  # positional and named arguments
    returned = pytree.tree_structure(tuple(range(outputs)))
    return ModuleCallEntry("", ModuleCallSignature([], [], taken, returned))


def _describe_output(arguments: list[Node], written: Node, component: int, value: Node) -> Output:
    """Describe `value`, which the program returns for a component of the argument `written`."""
    dims = sizes(value)
    carriers = [_row_carrier(arguments, size) for size in dims if not isinstance(size, int)]
    rows = carriers[-1] if carriers else None
    shape = tuple(size if isinstance(size, int) else -1 for size in dims)
    return Output(arguments.index(written), component, rows, shape)


def _split_into_components(graph: Graph, written: Node, stored: Node) -> Iterator[Node]:
    """Yield the tensor that the program stores into each component of the argument `written`, in
    the argument's dtype. `stored` is the node of the argument's new content."""
    value = _value_before_store(written, stored)
    shape = sizes(value)
    if len(sizes(written)) == 1:
        value = _select_as_slice(graph, value)
    dtype = written.meta["val"].dtype
    if value.meta["val"].dtype != dtype:
        value = insert(graph, aten._to_copy.default, value, dtype=dtype)
    if len(sizes(written)) == 1 or shape[0] == 1:
        yield _value_before_views(value)
        return
    dim = 0
    if value.target is aten.transpose.int:  # split along the other dimension: saves a node
        value, dim = as_node(value.args[0]), 1
    split = insert(graph, aten.split_with_sizes.default, value, [1] * int(shape[0]), dim)
    for component in range(int(shape[0])):
        yield insert(graph, operator.getitem, split, component)


def _value_before_store(written: Node, stored: Node) -> Node:
    """Find the value that the program stores into the rows in use of the argument `written`. It may
    have another dtype. Raises NotApplicableError if it has another shape."""
    if stored.target is aten.slice_scatter.default and stored.args[0] is written:
        stored = as_node(stored.args[1])
    shape = sizes(stored)
    if stored.target is aten.copy.default:  # a store, which converts by itself
        stored = as_node(stored.args[1])
    if sizes(stored) != shape:
        raise NotApplicableError(
            f"{written.name} is filled from a tensor of another shape: expand that tensor in the "
            "model"
        )
    return stored


def _select_as_slice(graph: Graph, value: Node) -> Node:
    """If `value` is a column `matrix[:, k]`, return `matrix[:, k:k+1]` instead, else `value`
    itself.

    With one dimension, ONNX Runtime would first copy the column and then reshape it.
    """
    if value.target is not aten.select.int:
        return value
    selection: Any = value.args
    matrix, dim, k = selection
    if dim != 1 or k < 0 or len(sizes(matrix)) != 2 or sizes(matrix)[1] == 1:
        return value
    return insert(graph, aten.slice.Tensor, matrix, dim, k, k + 1)


def _value_before_views(value: Node) -> Node:
    """Go back from a single column to the value that its views show. As the last node of an ONNX
    graph, a view would be a copy."""
    while value.target in _VIEWS:
        before = as_node(value.args[0])
        long_sizes = _sizes_above_one(before)
        if before.op == "placeholder" or len(long_sizes) != 1:
            break  # an input cannot be an output; other views reorder elements
        if long_sizes != _sizes_above_one(value):
            break  # a view of a part
        value = before
    return value


def _sizes_above_one(node: Node) -> list[Any]:
    """The sizes of a tensor without those that are 1."""
    return [size for size in sizes(node) if size != 1]


def _row_carrier(arguments: list[Node], rows: Any) -> int:
    """The index of the first argument with this number of rows, which is the argument that carries
    it: these come first. Raises NotApplicableError if there is none."""
    for i, argument in enumerate(arguments):
        if sizes(argument)[0] == rows:
            return i
    raise NotApplicableError(f"an output has {rows} rows, which is no row count of the arguments")


def _remove_unused(graph: Graph, arguments: list[Node], written: set[int]) -> None:
    """Remove the arguments with the indices in `written`, and all unused nodes. Raises
    NotApplicableError if the program reads such an argument."""
    erase_checks(graph)
    graph.eliminate_dead_code()
    for i in written:
        argument = arguments[i]
        for user in list(argument.users):
            if user.target is not aten.sym_size.int:
                raise NotApplicableError(f"the program reads {argument.name}, an output")
            dim: Any = user.args[1]
            carrier = _row_carrier(arguments, sizes(argument)[dim])
            user.args = (arguments[carrier], 0)  # the same number, of an argument that remains
    graph.eliminate_dead_code()
    for argument in arguments:
        if not argument.users:
            graph.erase_node(argument)
    graph.lint()
