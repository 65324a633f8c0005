"""TorchScript as a model that torch.export accepts."""

from __future__ import annotations

from typing import Any

import torch

from engines.exported import quiet_torch
from stages.model.fronts import InFront


class Replayed(torch.nn.Module):
    """Calls TorchScript, and is itself no TorchScript: an export then sees the operators that run,
    and the script's weights are constants. They ask for gradients, since attention without them is
    one operator, which few engines know."""

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.training = False
        self.script = (script,)  # in a tuple: an export refuses it as a submodule
        for weight in script.parameters():
            weight.requires_grad_(True)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.script[0](*inputs)


def as_exportable(model: torch.nn.Module, arguments: list[torch.Tensor]) -> torch.nn.Module:
    """A model that torch.export accepts, for these example `arguments`. TorchScript goes through
    torch's own converter, which keeps the number of rows free; code that it does not know is
    replayed (`Replayed`)."""
    if isinstance(model, InFront):
        return model.around(as_exportable(model.model, model.prepare(arguments)))
    if not isinstance(model, torch.jit.ScriptModule):
        return model
    from torch._export.converter import TS2EPConverter

    with quiet_torch():
        try:
            converted = TS2EPConverter(model, tuple(arguments)).convert()
            module: torch.nn.Module = converted.module(check_guards=False)
            return module
        except Exception:  # it raises many types, also for branches and arguments with defaults
            return Replayed(model)
