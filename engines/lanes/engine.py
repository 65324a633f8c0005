"""The engine `lanes`: native code in which SIMD lanes are rows; it runs without any library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.base import Engine, Executable, Portable
from engines.errors import NotApplicableError
from engines.native import NativeExecutable
from engines.target import Target

if TYPE_CHECKING:
    import torch


class LanesEngine(Engine, engine="lanes", order=5, options=False, torch=False):
    crosses = True
    cuts_rows = True

    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """The library, the C++ that it was made of, and the target that the runner asks for."""
        if target.device != "cpu":
            raise NotApplicableError(f"lanes builds for CPUs; found {target}")
        from engines.lanes.build import build

        return build(source.program, target, out)

    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        return NativeExecutable(file, device, instances, threads)
