"""Writes a model as TorchScript inside the calling convention: scripted, else traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Literal

import torch

from engines.errors import first_line
from engines.exported import quiet_torch
from soa.signature import Signature
from stages.errors import CaptureError
from stages.model import InFront, SoaProgram, TracedProgram

Route = Literal["auto", "script", "trace", "none"]


@dataclass(frozen=True)
class Script:
    """How model.ts was made, if it was; and why another way failed, or none was wanted."""

    made: Literal["scripted", "traced"] | None
    note: str | None


def write_torchscript(
    model: torch.nn.Module,
    signature: Signature,
    arguments: list[torch.Tensor],
    soa_arguments: list[torch.Tensor],
    route: Route,
    folder: Path,
    row_wise: bool = False,
) -> Script:
    """Write model.ts by scripting, else by tracing; or only by the `route` that is given, and
    raise CaptureError if that one fails. A ScriptModule is only scripted; with the route `none`
    nothing is written.

    `arguments`: row-major, for the bare model; `soa_arguments`: in the calling convention. A
    `row_wise` model is not traced: the trace would keep the example's number of rows.
    """
    if route == "none":
        return Script(None, "not wanted")
    if isinstance(model, torch.jit.ScriptModule):
        verbs, route = ["script"], "auto"
    else:
        verbs = ["script", "trace"] if route == "auto" else [route]
    notes: list[str] = []
    for verb in verbs:
        try:
            with quiet_torch(), torch.no_grad():
                core = _script(model) if verb == "script" else _trace(model, arguments, row_wise)
                whole = TracedProgram(SoaProgram(core, signature))
                program = torch.jit.trace(whole, tuple(soa_arguments), check_trace=False)
        except Exception as error:
            notes.append(f"does not {verb}: {first_line(error)}")
            if verb == route:
                raise CaptureError(f"the model {notes[-1]} (torchscript_route: {verb})") from error
            continue
        write_buffered(folder / "model.ts", partial(torch.jit.save, program))
        return Script("scripted" if verb == "script" else "traced", "; ".join(notes) or None)
    return Script(None, "; ".join(notes))


def _trace(
    model: torch.nn.Module, arguments: list[torch.Tensor], row_wise: bool
) -> torch.nn.Module:
    """The trace of the model on these arguments. CaptureError for a `row_wise` model."""
    if row_wise:
        raise CaptureError("it takes the number of rows as a plain number")
    traced: torch.nn.Module = torch.jit.trace(model, tuple(arguments), check_trace=False)
    return traced


def _script(model: torch.nn.Module) -> torch.nn.Module:
    """Script the user's model. Modules in front of it are left to be traced: they take any number
    of inputs."""
    if isinstance(model, InFront):
        return model.around(_script(model.model))
    return model if isinstance(model, torch.jit.ScriptModule) else torch.jit.script(model)


def write_buffered(path: Path, save: Callable[[BytesIO], None]) -> None:
    """Write through memory: on a full disk torch's own writer ends the whole process."""
    buffer = BytesIO()
    save(buffer)
    path.write_bytes(buffer.getbuffer())
