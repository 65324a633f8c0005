"""The usual way, with copies: SoA columns → row-major tensors → an engine → SoA columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engines.exported import quiet_torch
from soa import Collection, Signature
from soa.signature import BoundBlock
from stages.capture import example_case
from stages.reference.answers import Arrays, row_major_inputs

Model = Callable[[list[Tensor]], Sequence[Tensor]]
"""A model on row-major tensors, one for each block."""


def copying_way(
    signature: Signature,
    model: Model,
    inputs: Mapping[str, Collection],
    outputs: Mapping[str, Collection],
) -> Callable[[], None]:
    """A call that packs every block of columns, runs and unpacks. All columns must be plain."""
    input_views = [_column_views(bound, inputs) for bound in signature.inputs]
    output_views = [_column_views(bound, outputs) for bound in signature.outputs]

    def run() -> None:
        with torch.no_grad():
            answers = model([torch.stack(views, dim=1) for views in input_views])
            for views, answer in zip(output_views, answers, strict=True):
                for i, view in enumerate(views):
                    view.copy_(answer[:, i])

    return run


def _column_views(bound: BoundBlock, collections: Mapping[str, Collection]) -> list[Tensor]:
    """The columns of a block as tensors of shape (n,), which share the memory of the collection."""
    collection = collections[bound.block.collection]
    return [collection.tensor(name) for name in bound.block.columns]


def aoti_package(model: nn.Module, signature: Signature, inputs: Arrays, folder: Path) -> Any:
    """torch's `AOTICompiledModel` for contiguous rows, as a user would build it by hand."""
    path = folder / "row_major.pt2"
    if not path.exists():
        exported = _exported_rows(model, signature, inputs)
        with quiet_torch():
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(path), inductor_configs={"cpp.threads": 1}
            )
    return torch._inductor.aoti_load_package(str(path))


def _exported_rows(
    model: nn.Module, signature: Signature, inputs: Arrays
) -> torch.export.ExportedProgram:
    """The bare model, exported for contiguous rows."""
    arguments, shapes = _example(signature, inputs)
    with quiet_torch():
        return torch.export.export(model, arguments, dynamic_shapes=shapes, strict=False)


def aoti(compiled: Any) -> Model:
    """The fastest way to call a compiled package from Python."""
    run: Model = compiled.loader.run
    return run


def eager(model: nn.Module) -> Model:
    """A model with one output, run by torch itself."""
    return lambda rows: [model(*rows)]


def onnx_session(
    model: nn.Module, signature: Signature, inputs: Arrays, folder: Path
) -> Any | None:
    """An ONNX Runtime session of torch's own export, with one thread.

    If that is not possible, prints the reason and returns None.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch's ONNX exporter needs it
    except ImportError as error:
        print(f"without ONNX Runtime: {error.name} is not installed (pip install '.[bench]')")
        return None
    path = folder / "row_major.onnx"
    if not path.exists():
        arguments, shapes = _example(signature, inputs)
        try:
            with quiet_torch():
                torch.onnx.export(
                    model, arguments, str(path), dynamo=True, verbose=False, dynamic_shapes=shapes
                )
        except Exception as error:  # torch names no type for what it cannot export
            print(f"without ONNX Runtime: torch cannot export it: {str(error).splitlines()[0]}")
            return None
    return onnxruntime.InferenceSession(
        str(path), onnx_options(), providers=["CPUExecutionProvider"]
    )


def openvino(model: nn.Module, signature: Signature, inputs: Arrays) -> Model:
    """OpenVINO's own conversion of the model, with one thread and float32. Raises ImportError
    without it (`pip install openvino`)."""
    runtime = import_module("openvino")
    arguments, _ = _example(signature, inputs)
    with quiet_torch():
        converted = runtime.convert_model(model, example_input=arguments)
    settings = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False}  # fmt: skip
    request = runtime.compile_model(converted, "CPU", settings).create_infer_request()

    def run(rows: list[Tensor]) -> list[Tensor]:
        arrays = [tensor.numpy() for tensor in rows]
        answers = request.infer(arrays, share_inputs=True, share_outputs=True)
        return [torch.from_numpy(answer) for answer in answers.values()]

    return run


def onnx_options() -> Any:
    """Options of ONNX Runtime for one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return options


def onnx(session: Any) -> Model:
    """A session of ONNX Runtime as a model on row-major tensors."""
    names = [node.name for node in session.get_inputs()]

    def run(rows: list[Tensor]) -> list[Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in zip(names, rows, strict=True)}
        return [torch.from_numpy(answer) for answer in session.run(None, arrays)]

    return run


def _example(signature: Signature, inputs: Arrays) -> tuple[tuple[Tensor, ...], Any]:
    """Row-major arguments and their dynamic shapes, for torch's two exporters. The shape of one row
    of scalars is fixed."""
    dims = {}
    for name in signature.dims:
        rows = signature.ranges[name]
        dims[name] = torch.export.Dim(f"rows_{name}", min=rows.min, max=rows.max)
    shapes = []
    for bound in signature.inputs:
        is_one_row = bound.plan.kind == "scalars" and not bound.block.broadcast
        shapes.append({} if is_one_row else {0: dims[bound.rows]})
    return tuple(row_major_inputs(signature, inputs, example_case(signature))), tuple(shapes)
