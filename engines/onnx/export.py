"""Converts an exported program to a checked ONNX file."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engines.errors import EngineError, NotApplicableError, first_line
from engines.exported import load_program, quiet_torch, read_bools_as_bytes
from engines.onnx.program import OUTPUTS, OnnxProgram, input_name, return_columns
from soa.errors import causes, needs_extra

_MOST_BYTES_IN_GRAPH = 1 << 16
"""Tensors of at most this many bytes stay in the graph's file. The checker does not read the file
of weights, but it needs tensors that hold shapes, such as the sizes of a Split, which have 8 bytes
for each output column."""


def export(program: Path, opset: int | None, file: Path) -> dict[str, Any]:
    """Export a program to the ONNX file `file`, with the weights in `<file>.data`, and check it.

    If `opset` is None, torch chooses it. Returns the facts of the artifact: its opset and its IR
    version. Raises EngineError if the export fails; the message names the operation that ONNX, or
    the opset, does not have.
    """
    with needs_extra("onnx", EngineError):
        import onnx
        import onnx_ir
        import onnxscript  # noqa: F401 - torch's exporter needs it
    with quiet_torch():
        loaded = load_program(program)
        read_bools_as_bytes(loaded)
        rewritten = return_columns(loaded)
        model = _export_to_opset(rewritten, opset)
        _make_axes_positive(model.graph)
        outputs = [asdict(output) for output in rewritten.outputs]
        model.metadata_props[OUTPUTS] = json.dumps(outputs)
        data = f"{file.name}.data"
        onnx_ir.save(model, file, external_data=data, size_threshold_bytes=_MOST_BYTES_IN_GRAPH)
    try:
        onnx.checker.check_model(file, full_check=True)
    except onnx.checker.ValidationError as error:
        raise EngineError(f"onnx.checker: {first_line(error)}") from error
    return {"opset": model.opset_imports[""], "ir_version": model.ir_version}


def _export_to_opset(program: OnnxProgram, opset: int | None) -> Any:
    """Convert the program to a model of onnx_ir in this opset. If it is None, torch chooses one.
    Raises EngineError if torch cannot export it, or not to this opset."""
    try:
        exported: Any = torch.onnx.export(
            program.program,
            (),
            dynamo=True,
            verbose=False,
            opset_version=opset,
            input_names=[input_name(i) for i in program.inputs],
            output_names=[output.name for output in program.outputs],
        )
    except Exception as error:  # torch's exporter raises many types
        raise _explain_export_error(error) from error
    version: int = exported.model.opset_imports[""]
    if opset is not None and version != opset:
        raise NotApplicableError(_describe_failed_conversion(exported.model.graph, version, opset))
    return exported.model


def _make_axes_positive(graph: Any) -> None:
    """Rewrite the axes of reductions as 0, 1, … instead of -1, -2, …

    On a tensor without elements, for example at n = 0, ONNX Runtime 1.31 ignores negative axes and
    reduces nothing.
    """
    import onnx_ir

    for node in graph.all_nodes():
        if not node.op_type.startswith("Reduce") or len(node.inputs) < 2:
            continue
        reduced, axes = node.inputs[:2]
        if axes is None or axes.const_value is None or reduced.shape is None:
            continue
        from_the_front = axes.const_value.numpy() % len(reduced.shape)
        value = onnx_ir.Value(
            name=f"{node.name}_axes",
            type=onnx_ir.TensorType(onnx_ir.DataType.INT64),
            shape=onnx_ir.Shape(from_the_front.shape),
            const_value=onnx_ir.tensor(from_the_front, name=f"{node.name}_axes"),
        )
        node.graph.register_initializer(value)
        node.replace_input_with(1, value)


def _describe_failed_conversion(graph: Any, version: int, opset: int) -> str:
    """Say why torch did not convert a graph of opset `version` to `opset`: the operators that
    `opset` does not have, if there are any."""
    from onnx import defs

    used = {node.op_type for node in graph if node.domain == ""}  # "": ONNX's own operators
    missing = sorted(name for name in used if not defs.has(name, opset))
    origin = f"this program was made in opset {version}"
    if missing:
        return f"opset {opset} has no {', '.join(missing)}; {origin}"
    return f"{origin} and does not convert to opset {opset}"


def _explain_export_error(error: BaseException) -> EngineError:
    """Make an error of one line from an error of torch's exporter. It names the operation that ONNX
    does not have, or else repeats the first error's message."""
    chain = list(causes(error))
    for cause in chain:
        unknown = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", str(cause))
        if unknown:
            return NotApplicableError(f"ONNX has no operation for {unknown[1]}")
    return EngineError(f"torch cannot export this program to ONNX: {first_line(chain[-1])}")
