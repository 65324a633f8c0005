"""A TorchScript file of the torchscript engine, with a shell: a request's tensors in and out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.jit._fuser import optimized_execution

from engines.errors import EngineError, first_line
from engines.exported import quiet_torch
from serving.wire import Array, Program, Wire, WireTensor
from soa.dtypes import torch_dtype
from soa.signature import Argument, Signature

_NOT_THERE = ("uint16", "uint32")  # Triton's PyTorch backend has no such tensors
_TRACED_AT = 3  # rows; every other number is tried afterwards


class _Shell(torch.nn.Module):
    def __init__(self, inner: torch.jit.ScriptModule, signature: Signature, wire: Wire) -> None:
        super().__init__()
        self.training = False
        self.inner = inner
        self._signature, self._wire = signature, wire
        self._plans = {b.name: b.plan for b in (*signature.inputs, *signature.outputs)}

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = {t.name: _flat(t, x) for t, x in zip(self._wire.inputs, given, strict=True)}
        carriers = {
            t.rows: flat[t.name].narrow(1, 0, 0).to(torch.float32)
            for t in self._wire.inputs
            if not t.scalar
        }
        inputs: dict[tuple[str, str, int], torch.Tensor] = {}
        for t in self._wire.inputs:
            for i, k in enumerate(t.order):
                inputs[(t.collection, *t.components[k])] = flat[t.name].select(1, i)
        outputs: dict[tuple[str, str, int], torch.Tensor] = {}
        arguments = [
            self._argument(argument, carriers, inputs, outputs)
            for argument in self._signature.arguments
        ]
        self.inner(*arguments)
        return tuple(_answer(t, outputs) for t in self._wire.outputs)

    def _argument(
        self,
        argument: Argument,
        carriers: dict[str, torch.Tensor],
        inputs: dict[tuple[str, str, int], torch.Tensor],
        outputs: dict[tuple[str, str, int], torch.Tensor],
    ) -> torch.Tensor:
        if argument.kind == "carrier":
            return carriers[argument.rows]
        components = ((argument.column, argument.component),)
        if argument.kind == "matrix":
            components = self._plans[argument.block].components  # type: ignore[assignment]
        keys = [(argument.collection, name, k) for name, k in components]
        if argument.role == "input":
            made = torch.stack([inputs[key] for key in keys])
        else:
            n = carriers[argument.rows].shape[0]
            long = 1 if argument.kind == "scalar" else n
            made = torch.zeros((len(keys), long), dtype=torch_dtype(argument.dtype))
            outputs.update({key: made[i] for i, key in enumerate(keys)})
        return made if argument.kind == "matrix" else made[0]


def _flat(t: WireTensor, given: torch.Tensor) -> torch.Tensor:
    if t.scalar:
        return given.reshape(1, len(t.order))
    return given.transpose(0, 1) if t.rows_last else given.reshape(given.shape[0], len(t.order))


def _answer(t: WireTensor, outputs: dict[tuple[str, str, int], torch.Tensor]) -> torch.Tensor:
    columns = [outputs[(t.collection, *t.components[k])] for k in t.order]
    if t.rows_last:
        return torch.stack(columns)
    if t.scalar:
        return torch.cat(columns).reshape(t.dims)
    return torch.stack(columns, dim=1).reshape(columns[0].shape[0], *t.dims)


def write_script(artifact: Path, signature: Signature, wire: Wire, file: Path) -> None:
    """Trace the shell around the script and write it. Raises EngineError."""
    for t in (*wire.inputs, *wire.outputs):
        if t.column_dtype in _NOT_THERE:
            raise EngineError(f"{t.name} is {t.column_dtype}, which it does not carry")
    for dim in signature.dims:
        if not any(t.rows == dim and not t.scalar for t in wire.inputs):
            raise EngineError(f"no input has rows of {dim!r}")
    example = tuple(
        torch.zeros(t.shape(_TRACED_AT), dtype=torch_dtype(t.column_dtype)) for t in wire.inputs
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
    """The file in this process's libtorch, without its optimiser, as the configuration asks."""
    with quiet_torch():
        module = torch.jit.load(file)

    def run(given: Sequence[Array]) -> Sequence[Array]:
        with torch.no_grad(), optimized_execution(False):
            found = module(*map(torch.from_numpy, given))
        return [values.numpy() for values in found]

    return run
