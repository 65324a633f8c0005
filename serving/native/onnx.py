"""An ONNX file of the onnxruntime engine in a shell that takes requests and returns answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.errors import EngineError, first_line
from engines.onnx import OUTPUTS, Output, input_name, read_outputs
from serving.wire import Array, Program, Wire, WireTensor, argument_columns
from soa.errors import needs_extra
from soa.signature import Signature

_INNER = "artifact/"  # a prefix for the artifact's names, because a block may have such a name
_FLOAT32 = 1  # onnx.TensorProto.FLOAT, of which onnx is imported only where it is needed
_LARGEST = 2**31 - 1
"""The largest protobuf message in bytes: an ONNX file with its weights inside is one message."""


def write_onnx(artifact: Path, signature: Signature, wire: Wire, file: Path) -> None:
    """Write an ONNX file that contains the artifact in a shell, with its weights inside.

    Raises EngineError if onnx is missing, if the file would be too large, or if it is not valid.
    """
    with needs_extra("onnx", EngineError):
        import onnx
        import onnx.compose
    model = onnx.compose.add_prefix(onnx.load(artifact), _INNER)
    _add_shell(model, signature, wire)
    if model.ByteSize() > _LARGEST:
        raise EngineError(f"{artifact.name} with its weights is larger than 2 GB")
    onnx.save(model, file)
    try:
        onnx.checker.check_model(file, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise EngineError(f"onnx.checker: {first_line(error)}") from error


def open_onnx(file: Path, wire: Wire) -> Program:
    """Open an ONNX file with the ONNX Runtime of this process. Raises EngineError."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions have no public common base
        raise EngineError(f"ONNX Runtime: {first_line(error)}") from error
    input_names = [tensor.name for tensor in wire.inputs]
    output_names = [tensor.name for tensor in wire.outputs]

    def run(inputs: Sequence[Array]) -> Sequence[Array]:
        """Answer one request. Inputs and answers are in the order of the wire."""
        answers: Sequence[Array] = session.run(
            output_names, dict(zip(input_names, inputs, strict=True))
        )
        return answers

    return run


def _add_shell(model: Any, signature: Signature, wire: Wire) -> None:
    """Change `model` so that it takes the tensors of a request and returns those of an answer.

    Nodes are added before and after its graph, and its inputs and outputs become those of `wire`.
    """
    from onnx import helper

    graph = model.graph
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    outputs = read_outputs(metadata.get(OUTPUTS, ""))
    before = _nodes_before(graph, signature, wire)
    after = _nodes_after(graph, signature, wire, outputs)
    nodes = [*before.nodes, *graph.node, *after.nodes]
    del graph.node[:], graph.input[:], graph.output[:]
    graph.node.extend(nodes)
    for tensors, entries in ((wire.inputs, graph.input), (wire.outputs, graph.output)):
        for tensor in tensors:
            shape = [tensor.rows if extent < 0 else extent for extent in tensor.shape(-1)]
            dtype = helper.np_dtype_to_tensor_dtype(tensor.dtype)
            entries.append(helper.make_tensor_value_info(tensor.name, dtype, shape))


def _nodes_before(graph: Any, signature: Signature, wire: Wire) -> _Nodes:
    """Make the nodes that turn the inputs of a request into the inputs of the graph.

    Raises EngineError if the graph needs a row count, and no input of the request has such rows.
    """
    before = _Nodes(graph, "before")
    flat = {tensor.name: _add_flattening(before, tensor) for tensor in wire.inputs}
    places = {
        entry: (flat[tensor.name], i)
        for tensor in wire.inputs
        for i, entry in enumerate(tensor.entries)
    }
    # By dimension: its first input, which has the row count. Reversed, so that the first one stays.
    inputs = reversed(wire.inputs)
    with_rows = {tensor.rows: flat[tensor.name] for tensor in inputs if not tensor.scalar}
    dtypes = {entry.name: entry.type.tensor_type.elem_type for entry in graph.input}
    columns_of = argument_columns(signature)
    for i, argument in enumerate(signature.arguments):
        name = _INNER + input_name(i)
        if name not in dtypes:  # the graph does not use this argument, or it is an output
            continue
        if argument.kind == "carrier":
            if argument.rows not in with_rows:
                raise EngineError(f"no input has rows of {argument.rows!r}")
            starts, ends, axes = before.ints([0]), before.ints([0]), before.ints([1])
            counted = with_rows[argument.rows]
            no_columns = before.add("Slice", [counted, starts, ends, axes])  # (n, 0)
            before.add("Cast", [no_columns], into=name, to=_FLOAT32)
            continue
        columns = []
        for flat_input, index in (places[column] for column in columns_of[i]):
            columns.append(before.add("Gather", [flat_input, before.ints([index])], axis=1))
        if argument.dtype == "bool":  # artifacts take bytes, but those of older releases bools
            columns = [before.add("Cast", [column], to=dtypes[name]) for column in columns]
        if argument.kind == "matrix":
            joined = before.add("Concat", columns, axis=1)
            before.add("Transpose", [joined], into=name, perm=[1, 0])
        else:
            before.add("Reshape", [columns[0], before.ints([-1])], into=name)
    return before


def _nodes_after(graph: Any, signature: Signature, wire: Wire, outputs: Sequence[Output]) -> _Nodes:
    """Make the nodes that turn the outputs of the graph into the tensors of an answer."""
    after, columns_of = _Nodes(graph, "after"), argument_columns(signature)
    names = {columns_of[out.argument][out.component]: _INNER + out.name for out in outputs}
    for tensor in wire.outputs:
        columns = [
            after.add("Reshape", [names[entry], after.ints([-1, 1])]) for entry in tensor.entries
        ]
        joined = after.add("Concat", columns, axis=1)
        if tensor.rows_last:
            after.add("Transpose", [joined], into=tensor.name, perm=[1, 0])
        else:
            shape = list(tensor.dims) if tensor.scalar else [-1, *tensor.dims]
            after.add("Reshape", [joined, after.ints(shape)], into=tensor.name)
    return after


def _add_flattening(before: _Nodes, tensor: WireTensor) -> str:
    """Add a node that brings an input into the shape (n, F); return the name of its result.

    n is the number of rows, which is 1 for a scalar, and F the number of entries of a row.
    """
    if tensor.scalar:
        return before.add("Reshape", [tensor.name, before.ints([1, -1])])
    if tensor.rows_last:
        return before.add("Transpose", [tensor.name], perm=[1, 0])
    return before.add("Flatten", [tensor.name], axis=1)


class _Nodes:
    """Collects nodes for a graph. Their constants are added to the graph immediately.

    `name`: a part of the nodes' names, so it must be unique in the graph.
    """

    def __init__(self, graph: Any, name: str) -> None:
        self.nodes: list[Any] = []
        self._graph, self._name = graph, name

    def add(self, op: str, inputs: list[str], into: str = "", **attributes: Any) -> str:
        """Add a node, and return the name of its result: `into` if given, else a new name."""
        from onnx import helper

        result = into or f"shell/{self._name}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [result], f"node/{result}", **attributes))
        return result

    def ints(self, values: list[int]) -> str:
        """Add a constant vector of int64 to the graph, and return its name."""
        from onnx import TensorProto, helper

        name = f"shell/constant_{len(self._graph.initializer)}"
        constant = helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
        self._graph.initializer.append(constant)
        return name
