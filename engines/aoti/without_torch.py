"""The `aoti-standalone` engine: a process that opens its artifacts needs no torch.

So this file imports none; what builds is standalone.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.base import Engine, Executable, Portable
from engines.native import NativeExecutable
from engines.target import Target

if TYPE_CHECKING:
    import torch


class StandaloneEngine(Engine, engine="aoti-standalone", order=13, default=False, torch=False):
    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """As for `aoti`; EngineError names what needs torch, with the model's line."""
        from engines.aoti.standalone import StandaloneBuild

        return StandaloneBuild().compile(source, target, options, out)

    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        return NativeExecutable(file, device, instances, threads)
