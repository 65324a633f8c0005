"""A version's ONNX or TorchScript file, as a model for Triton's own backends.

The artifacts of a bundle have special arguments: a carrier of the row count, blocks `(F, S)` of
which they use the first rows, and outputs to be filled. Triton's own backends do not pass such
arguments. So the file contains the artifact in a shell, which takes the tensors of a request
(serving/wire.py) and returns those of an answer.

The files were never run in a Triton with these backends. But `pipeline deploy` tests each file that
it writes: it runs the reference with ONNX Runtime or libtorch in this process, with the arguments
that Triton would pass. A TensorRT plan is made from the ONNX file: see serving/native/tensorrt.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from engines.base import Executable
from engines.errors import EngineError, RunError
from registry.bundle import Bundle
from serving.arrays import Arrays
from serving.errors import ServingError
from serving.wire import Program, Wire, locations
from soa.signature import Signature

if TYPE_CHECKING:
    from serving.native.tensorrt import PlanTuning

Backend = Literal["python", "onnxruntime", "pytorch", "tensorrt"]

ENGINES: dict[Backend, str] = {
    "onnxruntime": "onnxruntime",
    "pytorch": "torchscript",
    "tensorrt": "onnxruntime",
}
"""The engine whose artifact each backend gets; a TensorRT plan is made from the ONNX file."""

FILES: dict[Backend, str] = {
    "python": "model.py",
    "onnxruntime": "model.onnx",
    "pytorch": "model.pt",
    "tensorrt": "model.plan",
}


@dataclass(frozen=True)
class Native:
    """The file to serve, and the program that runs it in this process."""

    file: Path
    program: Program


def artifact_of(bundle: Bundle, target: str, backend: Backend) -> tuple[str, str]:
    """The target and the engine of the artifact for a backend. Raises ServingError if none exists.

    For a TensorRT plan the artifact of any target can be used, because the export to ONNX does not
    depend on the target, and the plan is tested anyway.
    """
    name, targets = ENGINES[backend], bundle.manifest.targets
    candidates = {each: record.candidates.get(name) for each, record in targets.items()}
    valid = [
        each for each, c in candidates.items() if c is not None and c.status == "valid" and c.files
    ]
    if target in valid:
        return target, name
    if backend == "tensorrt" and valid:
        return valid[0], name
    candidate = candidates.get(target)
    why = candidate.reason or candidate.status if candidate else "it was built without it"
    more = f"; {valid[0]} has one: --target {valid[0]}" if valid else ""
    raise ServingError(
        f"{bundle.manifest.name} has no valid artifact of {name} for {target}, which Triton's "
        f"{backend} backend needs: {why}{more}"
    )


def make_native(
    artifact: Path,
    backend: Backend,
    signature: Signature,
    wire: Wire,
    folder: Path,
    tuning: PlanTuning | None = None,
) -> Native:
    """Write the file that Triton's `backend` would load into `folder`, and open it.

    `tuning`: only for a TensorRT plan. Raises ServingError if the backend lacks a dtype of the
    wire, or if the file cannot be made.
    """
    file = folder / FILES[backend]
    try:
        if tuning is not None:
            from serving.native.tensorrt import OpenPlan, write_plan

            graph = folder / FILES["onnxruntime"]
            write_plan(artifact, signature, wire, tuning, graph, file)
            return Native(file, OpenPlan(file, wire, tuning.plan.gpu))
        if backend == "onnxruntime":
            from serving.native.onnx import open_onnx, write_onnx

            write_onnx(artifact, signature, wire, file)
            return Native(file, open_onnx(file, wire))
        from serving.native.torchscript import open_script, write_script

        write_script(artifact, signature, wire, file)
        return Native(file, open_script(file))
    except EngineError as error:
        raise ServingError(f"no model for Triton's {backend} backend: {error}") from None


class ProgramExecutable(Executable):
    """A program with the interface of an opened artifact, so that it can be validated like one."""

    def __init__(self, signature: Signature, wire: Wire, program: Program) -> None:
        self._wire, self._program = wire, program
        self._dims = signature.dims
        self._given = locations(signature, wire.inputs, "input")
        self._written = locations(signature, wire.outputs, "output")

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        rows = {dim: arguments[i].shape[0] for i, dim in enumerate(self._dims)}
        memory = Arrays().of(arguments)
        given = [
            np.ascontiguousarray(
                t.gather(self._given[t.name].parts(memory), 0, rows[t.rows])
            ).reshape(t.shape(rows[t.rows]))
            for t in self._wire.inputs
        ]
        answers = self._program(given)
        for t, values in zip(self._wire.outputs, answers, strict=True):
            wanted = (t.dtype, t.shape(rows[t.rows]))
            if (values.dtype, values.shape) != wanted:
                raise RunError(f"{t.name} is {values.dtype} {values.shape}, needed is {wanted}")
            t.scatter(self._written[t.name].parts(memory), 0, values)
