"""The engines that use AOTInductor: native code for one target, opened from its unpacked files.

The compilation is in build.py and standalone.py. This file does not import torch, so that a
process that only runs a model does not need it.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.aoti.needs import needs_libtorch, needs_proxy_executor
from engines.base import Engine, Executable, Portable
from engines.errors import EngineError, first_line
from engines.lanes import named_compiler
from engines.native import NativeExecutable
from engines.processes import require_openmp
from engines.target import Target

if TYPE_CHECKING:
    import torch

    from engines.aoti.build import AotiBuild


class AotiEngine(Engine, engine="aoti", order=10):
    """Compiles by AOTInductor, torch's own compiler, and runs the native code."""

    imports = ("torch._inductor.compile_fx", "torch._inductor.package")
    in_place_of = "lanes"
    for_heavy_rows = True

    def make_builder(self) -> AotiBuild:
        """Make the object that compiles for this engine. It imports torch."""
        from engines.aoti.build import AotiBuild

        return AotiBuild()

    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """Compile with the options `threads` (1: only the thread of the caller) and all settings of
        Inductor. Raises EngineError if there is no C++ compiler that Inductor can use."""
        compiler, *compiler_options = named_compiler() or ("g++",)
        if compiler_options:  # torch takes all of CXX for the name of a file
            command = " ".join([compiler, *compiler_options])
            raise EngineError(f"CXX={command}: {self.name} needs a compiler without options")
        if shutil.which(compiler) is None:
            raise EngineError(f"no C++ compiler is here: {compiler} is not on PATH; install g++")
        return self.make_builder().compile(source, target, options, out)

    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        """Open with the native runner, or with torch's runner if an operation has no C function."""
        if not needs_proxy_executor(file):
            _load_libtorch(file, device)
            return NativeExecutable(file, device, instances, threads)
        try:
            return _TorchRunner(file, device)
        except RuntimeError as error:
            raise EngineError(
                f"{file.name} cannot be opened as native code: {first_line(error)}"
            ) from error


class StandaloneEngine(AotiEngine, engine="aoti-standalone", order=13, torch=False):
    """AOTInductor for artifacts that run without torch. For the models that `lanes` supports,
    `lanes` is faster, except for single rows of large networks."""

    for_heavy_rows = False

    def make_builder(self) -> AotiBuild:
        from engines.aoti.standalone import StandaloneBuild

        return StandaloneBuild()

    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        return NativeExecutable(file, device, instances, threads)


class _TorchRunner(Executable):
    """torch's runner, for artifacts that need torch's proxy executor."""

    def __init__(self, file: Path, device: torch.device) -> None:
        from torch._C import _aoti

        if device.type == "cpu":
            runner: Any = _aoti.AOTIModelContainerRunnerCpu(str(file), 1)
        else:
            kernels = str(file.parent)
            runner = _aoti.AOTIModelContainerRunnerCuda(str(file), 1, str(device), kernels)
        self._run = runner.run

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        """Run once, on torch's number of threads."""
        import torch

        require_openmp(torch.get_num_threads())
        self._run(list(arguments))


def _load_libtorch(artifact: Path, device: torch.device) -> None:
    """Load the libraries of torch with which the artifact is linked, without torch's Python part
    where that is possible."""
    imported = "torch" in sys.modules
    if imported or device.type != "cpu" or not _load_libtorch_alone(artifact):
        import torch as torch  # also if it is imported: another thread may be doing it now


def _load_libtorch_alone(artifact: Path) -> bool:
    """Try to load libtorch without torch's Python part, which takes most of an import's time.

    Returns False if that fails: torch's folder is not known, or the loader does not find a
    dependency that `import torch` would find.
    """
    torch_package = find_spec("torch")
    if torch_package is None or torch_package.origin is None:
        return False
    libraries = Path(torch_package.origin).parent / "lib"
    try:
        ctypes.CDLL(str(libraries / "libtorch_cpu.so"))
        if needs_libtorch(artifact):
            ctypes.CDLL(str(libraries / "libtorch.so"))
    except OSError:
        return False
    return True
