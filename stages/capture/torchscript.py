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
    """How model.ts was made; None if it was not. `note` says why another way failed, or that none
    was wanted; None if there is nothing to say."""

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
    """Write model.ts into `folder`: the model in the calling convention, as TorchScript.

    With the route `auto` the model is scripted or, if that fails, traced; if both fail, nothing is
    written. With `script` or `trace` only this is tried, and CaptureError is raised if it fails.
    With `none` nothing is written. A ScriptModule is only ever scripted.

    `arguments` are row-major, for the bare model; `soa_arguments` are the same rows in the calling
    convention. A `row_wise` model takes the number of rows as a plain number and is not traced,
    since a trace would keep the example's number.
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
                in_convention = TracedProgram(SoaProgram(core, signature))
                program = torch.jit.trace(in_convention, tuple(soa_arguments), check_trace=False)
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
    """Trace the model on these arguments. Raises CaptureError for a `row_wise` model."""
    if row_wise:
        raise CaptureError("it takes the number of rows as a plain number")
    traced: torch.nn.Module = torch.jit.trace(model, tuple(arguments), check_trace=False)
    return traced


def _script(model: torch.nn.Module) -> torch.nn.Module:
    """Script the user's own model. Modules in front of it are kept as they are, and traced later,
    since a script cannot take any number of inputs."""
    if isinstance(model, InFront):
        return model.around(_script(model.model))
    return model if isinstance(model, torch.jit.ScriptModule) else torch.jit.script(model)


def write_buffered(path: Path, save: Callable[[BytesIO], None]) -> None:
    """Let `save` write into memory, and then write that into the file `path`. On a full disk
    torch's own writer would end the whole process."""
    buffer = BytesIO()
    save(buffer)
    path.write_bytes(buffer.getbuffer())
