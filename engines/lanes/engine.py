"""The engine `lanes`: native code in which each SIMD lane, or each thread of a GPU, computes a row.

The code needs no library, except for a GPU's driver.
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


class LanesEngine(Engine, engine="lanes", order=5, options=False, torch=False):
    crosses = True
    cuts_rows = True

    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """Writes a library for a CPU, a kernel for a GPU or a C++ header for `source` into `out`.

        Returns the names of the files, of which the first is the artifact. Among the others are the
        target, which the runner reads, and the source of a library or kernel.
        """
        from engines.lanes.compiling import build, build_header, build_kernel

        if target.device == "source":
            return build_header(source, target, out)
        if target.device == "cpu":
            return build(source.program, target, out)
        return build_kernel(source.program, target, out)

    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        return NativeExecutable(file, device, instances, threads)
