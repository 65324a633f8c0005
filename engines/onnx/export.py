"""Converts an exported program to a checked ONNX file."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engines.errors import EngineError, NotApplicableError, first_line
from engines.exported import bytes_for_bools, load_program, quiet_torch
from engines.onnx.program import OUTPUTS, OnnxProgram, input_name, returning_columns
from soa.errors import causes, needs_extra

_WITH_THE_GRAPH = 1 << 16
"""Tensors up to this many bytes stay in the graph's file. The checker does not read the file of
weights, but needs tensors of shapes, such as the sizes of a Split: 8 bytes for an output column."""


def export(program: Path, opset: int | None, file: Path) -> dict[str, Any]:
    """Write `file`, and its weights to `<file>.data`; returns its opset and IR version.

    If `opset` is None, torch chooses it. Raises EngineError; the message names the operation that
    ONNX, or the opset, does not have.
    """
    with needs_extra("onnx", EngineError):
        import onnx
        import onnx_ir
        import onnxscript  # noqa: F401 - torch's exporter needs it
    with quiet_torch():
        loaded = load_program(program)
        bytes_for_bools(loaded)
        rewritten = returning_columns(loaded)
        model = _onnx_model(rewritten, opset)
        _axes_from_the_front(model.graph)
        model.metadata_props[OUTPUTS] = json.dumps([asdict(each) for each in rewritten.outputs])
        onnx_ir.save(
            model,
            file,
            external_data=f"{file.name}.data",
            size_threshold_bytes=_WITH_THE_GRAPH,
        )
    try:
        onnx.checker.check_model(file, full_check=True)
    except onnx.checker.ValidationError as error:
        raise EngineError(f"onnx.checker: {first_line(error)}") from error
    return {"opset": model.opset_imports[""], "ir_version": model.ir_version}


def _onnx_model(program: OnnxProgram, opset: int | None) -> Any:
    """The program as a model of onnx_ir, in this opset; torch chooses one if it is None."""
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
        raise _export_error(error) from error
    version: int = exported.model.opset_imports[""]
    if opset is not None and version != opset:
        raise NotApplicableError(_conversion_error(exported.model.graph, version, opset))
    return exported.model


def _axes_from_the_front(graph: Any) -> None:
    """Write the axes of reductions as 0, 1, … instead of -1, -2, …

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


def _conversion_error(graph: Any, version: int, opset: int) -> str:
    """Why a graph of opset `version` was not converted to `opset`, as a message."""
    from onnx import defs

    used = {node.op_type for node in graph if node.domain == ""}  # "": ONNX's own operators
    missing = sorted(name for name in used if not defs.has(name, opset))
    origin = f"this program was made in opset {version}"
    if missing:
        return f"opset {opset} has no {', '.join(missing)}; {origin}"
    return f"{origin} and does not convert to opset {opset}"


def _export_error(error: BaseException) -> EngineError:
    """An error of one line: the operation that ONNX does not have, or the exporter's message."""
    chain = list(causes(error))
    for cause in chain:
        unknown = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", str(cause))
        if unknown:
            return NotApplicableError(f"ONNX has no operation for {unknown[1]}")
    return EngineError(f"torch cannot export this program to ONNX: {first_line(chain[-1])}")
