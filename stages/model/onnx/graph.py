"""An ONNX graph as a torch module: each node becomes a torch operation, and torch.export makes one
program of them for all engines.

Sizes (the results of `Shape`, and small integer constants) stay in NumPy arrays of ints and of
torch's symbols, so that no row count becomes a constant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.errors import first_line
from stages.errors import CaptureError, SourceError
from stages.model.onnx.classical import CLASSICAL
from stages.model.onnx.file import read_onnx, replace_text_and_maps
from stages.model.onnx.operators import MOST_SIZES, ON_SIZES, OPERATORS, SIZES_AT, Node

_DOMAINS, _OPSET = ("", "ai.onnx"), 13


class OnnxGraph(torch.nn.Module):
    """The network as torch operations; constants are buffers.

    Raises SourceError naming each operator that is not known here, with one node that has it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.training = False
        graph = _read_in_opset_13(path)
        _require_known(graph, path)
        from onnx import numpy_helper

        self.constants: dict[str, Any] = {}
        for tensor in graph.initializer:
            self._add_constant(tensor.name, numpy_helper.to_array(tensor))
        self.nodes = [Node(node) for node in graph.node if node.op_type != "Constant"]
        self.classical = torch.nn.ModuleDict()
        for i, node in enumerate(self.nodes):
            if node.kind in CLASSICAL:
                try:
                    self.classical[str(i)] = CLASSICAL[node.kind](node)
                except (ValueError, LookupError, TypeError) as error:
                    raise SourceError(f"{path}: {node.name}: {first_line(error)}") from error
        for node in (Node(node) for node in graph.node if node.op_type == "Constant"):
            ((kind, value),) = node.attributes.items()
            dtype = np.float32 if kind.startswith("value_float") else None
            self._add_constant(node.outputs[0], np.asarray(value, dtype))
        names = [value.name for value in graph.input]
        self.input_names = [name for name in names if name not in self.constants]
        self.output_names = [value.name for value in graph.output]

    def _add_constant(self, name: str, value: Any) -> None:
        """Add an array as the constant `name`. A few integers may be sizes, and stay in NumPy; any
        other array becomes a buffer, and `constants` has the name of the buffer."""
        if value.dtype == np.int64 and value.ndim < 2 and value.size <= MOST_SIZES:
            self.constants[name] = value.astype(object)
        else:
            self.constants[name] = f"constant_{len(self.constants)}"
            self.register_buffer(self.constants[name], torch.from_numpy(np.array(value)))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the nodes one after the other, and return the outputs in the graph's order."""
        # "" names an input that the node leaves out.
        values: dict[str, Any] = {"": None, **dict(zip(self.input_names, inputs, strict=True))}
        for name, value in self.constants.items():
            values[name] = getattr(self, value) if isinstance(value, str) else value
        for i, node in enumerate(self.nodes):
            arguments = [values[name] for name in node.inputs]
            if str(i) in self.classical:
                returned = self.classical[str(i)](*map(_as_tensor, arguments))
            else:
                returned = _run_node(node, arguments)
            results = returned if isinstance(returned, tuple | list) else (returned,)
            node.check(len(results))
            values.update(zip(node.outputs, results, strict=True))
        return tuple(_as_tensor(values[name]) for name in self.output_names)


def _read_in_opset_13(path: Path) -> Any:
    """Read the graph in a file, with its functions inlined, and converted to opset 13 if its own is
    older. Raises SourceError."""
    model = read_onnx(path)
    replace_text_and_maps(model, path)
    import onnx.inliner
    import onnx.version_converter

    try:
        model = onnx.inliner.inline_local_functions(model)
        opset = [entry.version for entry in model.opset_import if entry.domain in _DOMAINS]
        if opset and min(opset) < _OPSET:
            model = onnx.version_converter.convert_version(model, _OPSET)
    except Exception as error:  # ONNX's C++ raises many types
        raise SourceError(f"{path} has no form in opset 13: {first_line(error)}") from error
    return model.graph


def _require_known(graph: Any, path: Path) -> None:
    """Raise SourceError if the graph has operators that have no torch form here. It lists each of
    them with the first node that has it."""
    known = {*OPERATORS, *ON_SIZES, "Constant", "Shape"}
    unknown = [
        node
        for node in graph.node
        if node.op_type not in (known if node.domain in _DOMAINS else CLASSICAL)
    ]
    if unknown:
        first_node = {node.op_type: node.name or node.output[0] for node in reversed(unknown)}
        listed = ", ".join(f"{kind} (node {name!r})" for kind, name in first_node.items())
        raise SourceError(f"{path} has operators that have no torch form here: {listed}")


def _run_node(node: Node, inputs: list[Any]) -> Any:
    """Run a node. Returns a tensor, several tensors, or an array of sizes.

    The entries of `inputs` are tensors, arrays of sizes, or None; the list is changed in place. A
    node that gets only sizes computes sizes, if it can. Raises CaptureError if the node takes a
    size from data, or if it can compute with sizes only and gets data.
    """
    if node.kind == "Shape":
        return _array_of(list(inputs[0].shape)[node("start", 0) : node("end")])
    if node.kind in ON_SIZES and all(x is None or isinstance(x, np.ndarray) for x in inputs):
        sizes = ON_SIZES[node.kind](node, *inputs)
        if sizes is not None:
            return np.asarray(sizes, object)
    places_of_sizes = SIZES_AT.get(node.kind, "1" if node.kind.startswith("Reduce") else "")
    if node.kind == "Gather" and isinstance(inputs[1], np.ndarray) and inputs[1].ndim == 0:
        places_of_sizes = "1"  # torch takes a single index as a plain integer
    for i, value in enumerate(inputs):
        if str(i) not in places_of_sizes:
            inputs[i] = _as_tensor(value)
        elif isinstance(value, Tensor):
            raise CaptureError(
                f"{node.name} takes a size out of the data, which no artifact can do"
            )
        elif value is not None:
            inputs[i] = value.tolist()
    if node.kind not in OPERATORS:
        raise CaptureError(f"{node.name} is supported for sizes only; here it works on data")
    return OPERATORS[node.kind](node, *inputs)


def _array_of(sizes: list[Any]) -> Any:
    """The sizes as a NumPy array of objects. numpy.array would try to convert torch's symbols to
    numbers, which would fix the sizes."""
    array = np.empty(len(sizes), object)
    array[:] = sizes
    return array


def _as_tensor(value: Any) -> Any:
    """Convert an array of sizes to an int64 tensor. Any other value is returned unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    if all(type(size) is int for size in value.flat):
        return torch.tensor(value.tolist(), dtype=torch.int64)
    sizes = [torch.scalar_tensor(size, dtype=torch.int64) for size in value.flat]
    return torch.stack(sizes).reshape(value.shape)
