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
from stages.model.onnx.file import as_numbers, read
from stages.model.onnx.operators import MOST_SIZES, ON_SIZES, OPERATORS, SIZES_AT, Node

_DOMAINS = ("", "ai.onnx")


class OnnxGraph(torch.nn.Module):
    """The network as torch operations; constants are buffers.

    Raises SourceError naming each operator that is not known here, with one node that has it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.training = False
        graph = _in_opset_13(path)
        _require_known(graph, path)
        from onnx import numpy_helper

        self.constants: dict[str, Any] = {}
        for tensor in graph.initializer:
            self._keep(tensor.name, numpy_helper.to_array(tensor))
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
            self._keep(node.outputs[0], np.asarray(value, dtype))
        self.input_names = [i.name for i in graph.input if i.name not in self.constants]
        self.output_names = [o.name for o in graph.output]

    def _keep(self, name: str, value: Any) -> None:
        if value.dtype == np.int64 and value.ndim < 2 and value.size <= MOST_SIZES:
            self.constants[name] = value.astype(object)
        else:
            self.constants[name] = f"constant_{len(self.constants)}"
            self.register_buffer(self.constants[name], torch.from_numpy(np.array(value)))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values: dict[str, Any] = {"": None, **dict(zip(self.input_names, inputs, strict=True))}
        for name, value in self.constants.items():
            values[name] = getattr(self, value) if isinstance(value, str) else value
        for i, node in enumerate(self.nodes):
            arguments = [values[name] for name in node.inputs]
            if str(i) in self.classical:
                returned = self.classical[str(i)](*map(_tensor, arguments))
            else:
                returned = _run(node, arguments)
            several = returned if isinstance(returned, tuple | list) else (returned,)
            node.check(len(several))
            values.update(zip(node.outputs, several, strict=True))
        return tuple(_tensor(values[name]) for name in self.output_names)


def _in_opset_13(path: Path) -> Any:
    """The graph in the file, with its functions inlined. Raises SourceError."""
    model = read(path)
    as_numbers(model, path)
    import onnx.inliner
    import onnx.version_converter

    try:
        model = onnx.inliner.inline_local_functions(model)
        opset = [o.version for o in model.opset_import if o.domain in _DOMAINS]
        if opset and min(opset) < 13:
            model = onnx.version_converter.convert_version(model, 13)
    except Exception as error:  # ONNX's C++ raises many types
        raise SourceError(f"{path} has no form in opset 13: {first_line(error)}") from error
    return model.graph


def _require_known(graph: Any, path: Path) -> None:
    known = {*OPERATORS, *ON_SIZES, "Constant", "Shape"}
    odd = [n for n in graph.node if n.op_type not in (known if n.domain in _DOMAINS else CLASSICAL)]
    if odd:
        named = {node.op_type: node.name or node.output[0] for node in reversed(odd)}
        listed = ", ".join(f"{kind} (node {node!r})" for kind, node in named.items())
        raise SourceError(f"{path} has operators that have no torch form here: {listed}")


def _run(a: Node, inputs: list[Any]) -> Any:
    """The result of a node: a tensor, several tensors, or sizes."""
    if a.kind == "Shape":
        return _array(list(inputs[0].shape)[a("start", 0) : a("end")])
    if a.kind in ON_SIZES and all(x is None or isinstance(x, np.ndarray) for x in inputs):
        returned = ON_SIZES[a.kind](a, *inputs)
        if returned is not None:
            return np.asarray(returned, object)
    places = SIZES_AT.get(a.kind, "1" if a.kind.startswith("Reduce") else "")
    if a.kind == "Gather" and isinstance(inputs[1], np.ndarray) and inputs[1].ndim == 0:
        places = "1"
    for i, value in enumerate(inputs):
        if str(i) not in places:
            inputs[i] = _tensor(value)
        elif isinstance(value, Tensor):
            raise CaptureError(f"{a.name} takes a size out of the data, which no artifact can do")
        elif value is not None:
            inputs[i] = value.tolist()
    if a.kind not in OPERATORS:
        raise CaptureError(f"{a.name} is supported for sizes only; here it works on data")
    return OPERATORS[a.kind](a, *inputs)


def _array(sizes: list[Any]) -> Any:
    array = np.empty(len(sizes), object)
    array[:] = sizes
    return array


def _tensor(value: Any) -> Any:
    """Convert sizes to a tensor; any other value is returned unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    if all(type(size) is int for size in value.flat):
        return torch.tensor(value.tolist(), dtype=torch.int64)
    sizes = [torch.scalar_tensor(size, dtype=torch.int64) for size in value.flat]
    return torch.stack(sizes).reshape(value.shape)
