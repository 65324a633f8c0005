"""TorchScript as a model that torch.export accepts."""

from __future__ import annotations

from typing import Any

import torch

from engines.exported import quiet_torch
from stages.model.fronts import InFront


class Replayed(torch.nn.Module):
    """A module that calls TorchScript and is itself no TorchScript. An export of it sees the
    operators that run, with the script's weights as constants.

    The weights require gradients. Without this, torch runs attention as one operator, which few
    engines know.
    """

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.training = False
        self.script = (script,)  # in a tuple: an export refuses it as a submodule
        for weight in script.parameters():
            weight.requires_grad_(True)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.script[0](*inputs)


def as_exportable(model: torch.nn.Module, arguments: list[torch.Tensor]) -> torch.nn.Module:
    """A form of the model that torch.export accepts; only TorchScript needs another one.

    TorchScript is converted by torch's own converter with these example `arguments`, which keeps
    the number of rows free. If the converter fails, the script is wrapped in `Replayed`.
    """
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
