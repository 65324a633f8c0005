"""A TorchScript file of the torchscript engine in a shell that takes requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.jit._fuser import optimized_execution

from engines.errors import EngineError, first_line
from engines.exported import quiet_torch
from serving.wire import Array, PhysicalColumn, Program, Wire, WireTensor, argument_columns
from soa.dtypes import torch_dtype
from soa.signature import Signature

_MISSING_DTYPES = ("uint16", "uint32")  # Triton's PyTorch backend has no such tensors
_TRACED_AT = 3  # rows of the traced request; other row counts are tested afterwards


class _Shell(torch.nn.Module):
    """Takes the tensors of a request, runs the script `inner` on an artifact's arguments, and
    returns the tensors of the answer. It is traced, so its Python loops run only once, and torch
    writes the names of its local tensors into the file."""

    def __init__(self, inner: torch.jit.ScriptModule, signature: Signature, wire: Wire) -> None:
        super().__init__()
        self.training = False
        self.inner = inner
        self._signature, self._wire = signature, wire

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Answer one request: take the inputs and return the outputs, in the order of the wire."""
        read: dict[PhysicalColumn, torch.Tensor] = {}
        carriers: dict[str, torch.Tensor] = {}
        for spec, values in zip(self._wire.inputs, inputs, strict=True):
            flat = _flat(spec, values)
            read.update((entry, flat.select(1, i)) for i, entry in enumerate(spec.entries))
            if not spec.scalar:
                carriers[spec.rows] = flat.narrow(1, 0, 0).to(torch.float32)  # (n, 0)
        written: dict[PhysicalColumn, torch.Tensor] = {}
        arguments = []
        by_argument = argument_columns(self._signature)
        for argument, columns in zip(self._signature.arguments, by_argument, strict=True):
            if argument.kind == "carrier":
                arguments.append(carriers[argument.rows])
                continue
            if argument.role == "input":
                argument_tensor = torch.stack([read[column] for column in columns])
            else:
                long = 1 if argument.kind == "scalar" else carriers[argument.rows].shape[0]
                shape = (len(columns), long)
                argument_tensor = torch.zeros(shape, dtype=torch_dtype(argument.dtype))
                written.update((column, argument_tensor[i]) for i, column in enumerate(columns))
            arguments.append(argument_tensor if argument.kind == "matrix" else argument_tensor[0])
        self.inner(*arguments)
        return tuple(
            _answer(spec, [written[entry] for entry in spec.entries]) for spec in self._wire.outputs
        )


def _flat(spec: WireTensor, given: torch.Tensor) -> torch.Tensor:
    """Return an input in the shape (n, F): n rows, 1 for a scalar, of F entries each."""
    if spec.scalar:
        return given.reshape(1, len(spec.order))
    if spec.rows_last:
        return given.transpose(0, 1)
    return given.reshape(given.shape[0], len(spec.order))


def _answer(spec: WireTensor, columns: list[torch.Tensor]) -> torch.Tensor:
    """Make a tensor of the answer from the physical columns of its entries, in the wire's shape."""
    if spec.rows_last:
        return torch.stack(columns)
    if spec.scalar:
        return torch.cat(columns).reshape(spec.dims)
    return torch.stack(columns, dim=1).reshape(columns[0].shape[0], *spec.dims)


def write_script(artifact: Path, signature: Signature, wire: Wire, file: Path) -> None:
    """Trace a shell around the TorchScript file `artifact`, and write the result to `file`.

    Raises EngineError for a dtype that Triton's backend lacks, if no input has rows of a dimension,
    or if the script cannot be loaded or traced.
    """
    for spec in (*wire.inputs, *wire.outputs):
        if spec.column_dtype in _MISSING_DTYPES:
            raise EngineError(f"{spec.name} is {spec.column_dtype}, which it does not support")
    for dim in signature.dims:
        if not any(spec.rows == dim and not spec.scalar for spec in wire.inputs):
            raise EngineError(f"no input has rows of {dim!r}")
    example = tuple(
        torch.zeros(spec.shape(_TRACED_AT), dtype=torch_dtype(spec.column_dtype))
        for spec in wire.inputs
    )
    with quiet_torch(), torch.no_grad():
        try:
            inner = torch.jit.load(artifact, map_location="cpu")
            shell = _Shell(inner, signature, wire)
            traced = torch.jit.trace(shell, example, check_trace=False)
        except (RuntimeError, ValueError) as error:
            raise EngineError(first_line(error)) from error
        torch.jit.save(traced, file)


def open_script(file: Path) -> Program:
    """Open a TorchScript file with this process's libtorch.

    It runs without torch's optimiser, as config.pbtxt demands of Triton.
    """
    with quiet_torch():
        module = torch.jit.load(file)

    def run(inputs: Sequence[Array]) -> Sequence[Array]:
        """Answer one request. Inputs and answers are in the order of the wire."""
        with torch.no_grad(), optimized_execution(False):
            answers = module(*map(torch.from_numpy, inputs))
        return [values.numpy() for values in answers]

    return run
