"""A version's ONNX or TorchScript file, as a model for Triton's own backends.

The artifacts of a bundle have special arguments: a carrier of the row count, blocks `(F, S)` of
which they use the first rows, and outputs to be filled. Triton's own backends do not pass such
arguments. So the file contains the artifact in a shell, which takes the tensors of a request
(serving/wire.py) and returns those of an answer.

The files were never run in a Triton with these backends. But `pipeline deploy` tests each file that
it writes: it runs the reference with ONNX Runtime or libtorch in this process, with the arguments
that Triton would pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from engines.base import Executable
from engines.errors import EngineError, RunError
from registry.bundle import Bundle
from serving.errors import ServingError
from serving.wire import Program, Wire, locate_columns
from soa.signature import Signature

Backend = Literal["python", "onnxruntime", "pytorch"]

_ENGINES: dict[Backend, str] = {"onnxruntime": "onnxruntime", "pytorch": "torchscript"}
"""By one of Triton's own backends: the engine whose artifact it runs."""

FILES: dict[Backend, str] = {
    "python": "model.py",
    "onnxruntime": "model.onnx",
    "pytorch": "model.pt",
}
"""By backend: the name of the file that it loads."""


@dataclass(frozen=True)
class Native:
    """A file for one of Triton's own backends, and the program that runs it in this process."""

    file: Path
    program: Program


def engine_for(backend: Backend, bundle: Bundle, target: str) -> str:
    """Return the engine whose artifact `backend`, one of Triton's own, can run.

    Raises ServingError if this engine has no valid artifact for the target.
    """
    engine = _ENGINES[backend]
    candidates = {
        name: record.candidates[engine]
        for name, record in bundle.manifest.targets.items()
        if engine in record.candidates
    }
    usable = [name for name, tried in candidates.items() if tried.status == "valid" and tried.files]
    if target in usable:
        return engine
    reason = "it was built without it"
    if target in candidates:
        reason = candidates[target].reason or candidates[target].status
    other = next(iter(usable), None)
    elsewhere = f"; {other} has one: --target {other}" if other else ""
    raise ServingError(
        f"{bundle.manifest.name} has no valid artifact of {engine} for {target}, which Triton's "
        f"{backend} backend needs: {reason}{elsewhere}"
    )


def make_native(
    artifact: Path, backend: Backend, signature: Signature, wire: Wire, folder: Path
) -> Native:
    """Write the file that Triton's `backend` would load into `folder`, and open it.

    Raises ServingError if the backend lacks a dtype of the wire, or if the file cannot be made.
    """
    file = folder / FILES[backend]
    try:
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
    """Gives a program the interface of an opened artifact, so that it can be validated like one."""

    def __init__(self, signature: Signature, wire: Wire, program: Program) -> None:
        self._wire, self._program = wire, program
        self._dims = signature.dims
        self._inputs = locate_columns(signature, wire.inputs, "input")
        self._outputs = locate_columns(signature, wire.outputs, "output")

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        """Run the program on an artifact's arguments, and write its answers into the outputs.

        `arguments`: CPU tensors; the shapes of the first ones give the row counts. Raises RunError
        for an answer of another dtype or shape.
        """
        rows = {dim: arguments[i].shape[0] for i, dim in enumerate(self._dims)}
        memory = [argument.numpy() for argument in arguments]
        inputs = []
        for tensor in self._wire.inputs:
            n = rows[tensor.rows]
            gathered = tensor.gather(self._inputs[tensor.name].parts(memory), 0, n)
            contiguous = np.ascontiguousarray(gathered)  # as Triton passes them
            inputs.append(contiguous.reshape(tensor.shape(n)))  # a copy of shape () became (1,)
        answers = self._program(inputs)
        for tensor, values in zip(self._wire.outputs, answers, strict=True):
            wanted = (tensor.dtype, tensor.shape(rows[tensor.rows]))
            if (values.dtype, values.shape) != wanted:
                raise RunError(
                    f"{tensor.name} is {values.dtype} {values.shape}, needed is {wanted}"
                )
            tensor.scatter(self._outputs[tensor.name].parts(memory), 0, values)
