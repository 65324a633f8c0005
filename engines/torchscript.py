"""The `torchscript` engine: the scripted or traced model, frozen, in the calling convention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.jit._fuser import optimized_execution

from engines.base import Engine, Executable, Portable
from engines.errors import EngineError, NotApplicableError, first_line
from engines.exported import quiet_torch
from engines.processes import require_openmp
from engines.target import Target


class _Script(Executable):
    """A loaded module. A call uses torch's number of threads, and writes into the output
    columns."""

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self._module = module

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        require_openmp(torch.get_num_threads())
        # The profiling executor specialises for the first inputs. Without it, every call runs the
        # same code for every n, and the first call costs no more than the others.
        with torch.no_grad(), optimized_execution(should_optimize=False):
            self._module(*arguments)


class TorchScriptEngine(Engine, engine="torchscript", order=40, options=False):
    """Freezes the scripted or traced model, and runs it in TorchScript's interpreter."""

    anywhere = True
    in_place_of = "lanes"

    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """Freeze the module for a CPU. Returns no file for a GPU, and `open` takes the portable
        one. Raises NotApplicableError if the model could neither be scripted nor traced."""
        if source.torchscript is None:
            raise NotApplicableError(
                "the model neither scripts nor traces: there is no TorchScript file"
            )
        if target.device != "cpu":
            return []  # freezing would bind the weights to this host's device
        with quiet_torch():
            module = torch.jit.load(source.torchscript, map_location="cpu").eval()
            frozen = torch.jit.freeze(module)
            torch.jit.save(frozen, out / "model.ts")
        return ["model.ts"]

    def portable_file(self, source: Portable) -> Path | None:
        return source.torchscript

    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        """Load a module onto `device`. Raises EngineError if the file is not TorchScript."""
        with quiet_torch():
            try:
                return _Script(torch.jit.load(file, map_location=device))
            except (RuntimeError, ValueError) as error:
                raise EngineError(f"{file.name} is not TorchScript: {first_line(error)}") from error
