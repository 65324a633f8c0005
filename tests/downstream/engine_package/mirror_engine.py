"""The engine `mirror`: the TorchScript file as it is."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engines import Engine, Executable, NotApplicableError, Portable, Target


class Mirror(Executable):
    """A TorchScript module, which writes into its arguments."""

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self.module = module

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            self.module(*arguments)


class MirrorEngine(Engine, engine="mirror"):
    """Copies the TorchScript file, and opens the copy."""

    anywhere = True  # it builds on any host

    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        if target.device != "cpu" or source.torchscript is None:
            raise NotApplicableError(f"mirror takes TorchScript to CPUs; found {target}")
        shutil.copy2(source.torchscript, out / "mirror.ts")
        return ["mirror.ts"]

    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        return Mirror(torch.jit.load(file, map_location=device))
