"""Writes a model as TorchScript inside the calling convention: scripted, else traced."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Literal

import torch

from engines.errors import first_line
from engines.exported import quiet_torch
from soa.signature import Signature
from stages.errors import CaptureError
from stages.model import (
    InFront,
    SoaProgram,
    TracedProgram,
)

Route = Literal["auto", "script", "trace", "none"]


def torchscript(
    model: torch.nn.Module,
    signature: Signature,
    arguments: list[torch.Tensor],
    soa_arguments: list[torch.Tensor],
    route: Route,
    folder: Path,
    row_wise: bool = False,
) -> tuple[Literal["scripted", "traced"] | None, str | None]:
    """Write model.ts by scripting, else by tracing. Returns which one, and why the other failed.

    A `row_wise` model is not traced: the trace would keep the example's number of rows.
    """
    if route == "none":
        return None, "not wanted"
    notes: list[str] = []
    with quiet_torch(), torch.no_grad():
        core: torch.nn.Module | None = None
        made: Literal["scripted", "traced"] = "scripted"
        if isinstance(model, torch.jit.ScriptModule):
            core = model
        elif route in ("auto", "script"):
            try:
                core = _scripted(model)
            except Exception as error:
                notes.append(f"does not script: {first_line(error)}")
                if route == "script":
                    raise CaptureError(
                        f"the model {notes[0]} (torchscript_route: script)"
                    ) from error
        if core is None:
            made = "traced"
            try:
                core = _traced(model, arguments, row_wise)
            except Exception as error:
                notes.append(f"does not trace: {first_line(error)}")
                if route == "trace":
                    raise CaptureError(
                        f"the model {notes[-1]} (torchscript_route: trace)"
                    ) from error
                return None, "; ".join(notes)
        whole = TracedProgram(SoaProgram(core, signature))
        try:
            traced = torch.jit.trace(whole, tuple(soa_arguments), check_trace=False)
        except Exception as error:
            return None, "; ".join([*notes, f"does not trace: {first_line(error)}"])
        write_buffered(folder / "model.ts", lambda buffer: torch.jit.save(traced, buffer))
    return made, "; ".join(notes) or None


def _traced(
    model: torch.nn.Module, arguments: list[torch.Tensor], row_wise: bool
) -> torch.nn.Module:
    if row_wise:
        raise CaptureError("it takes the number of rows as a plain number")
    traced: torch.nn.Module = torch.jit.trace(model, tuple(arguments), check_trace=False)
    return traced


def _scripted(model: torch.nn.Module) -> torch.nn.Module:
    """Script the user's model. Modules in front of it are left to be traced: they take any number
    of inputs."""
    if isinstance(model, InFront):
        return model.around(_scripted(model.model))
    return model if isinstance(model, torch.jit.ScriptModule) else torch.jit.script(model)


def write_buffered(path: Path, save: Callable[[BytesIO], None]) -> None:
    """Write through memory: on a full disk torch's own writer ends the whole process."""
    buffer = BytesIO()
    save(buffer)
    path.write_bytes(buffer.getbuffer())
