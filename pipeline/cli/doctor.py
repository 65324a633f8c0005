"""Doctor: finds out what this host can build and run, and what is missing for the rest."""

from __future__ import annotations

import importlib.util
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines.errors import EngineError
from engines.kinds import host_cpu_levels, missing_features
from registry.errors import NoRegistryError, RegistryError
from registry.store import Registry

Status = Literal["ok", "warning", "missing"]
_ENOUGH_GB = 2
# By module: the extra of soa-pipeline that installs it.
_EXTRAS = {
    "onnxruntime": "cpu",
    "onnxscript": "onnx",
    "torch_tensorrt": "cuda",
    "mlflow.server": "mlflow",
    "uproot": "data",
}


@dataclass(frozen=True)
class Finding:
    """The result of one check. `what`: what was looked at. `found`: what there is. `cure`: what to
    do about a problem."""

    what: str
    status: Status
    found: str
    cure: str = ""


def examine(registry: Registry) -> Iterator[Finding]:
    """Check Python, torch, GPUs, the compiler, the CPU, optional libraries, the disk and the
    registry, one after the other. Yields what each check finds."""
    yield Finding("Python", "ok", platform.python_version())
    yield from _check_torch()
    yield _check_compiler()
    yield _check_cpu_level()
    for module, extra in _EXTRAS.items():
        yield _check_optional(module, extra)
    yield _check_disk()
    yield _check_registry(registry)


def _check_torch() -> Iterator[Finding]:
    """Yields what is found about torch, and about the GPU that torch sees."""
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", "missing", str(error), "pip install torch")
        yield Finding("GPU", "warning", "torch is missing")
        return
    yield Finding("torch", "ok", str(torch.__version__))
    if torch.cuda.is_available():
        yield Finding("GPU", "ok", torch.cuda.get_device_name(0))
    else:
        yield Finding("GPU", "warning", "torch sees none", "only CPU targets can be built here")


def _check_compiler() -> Finding:
    """Returns what is found about the C++ compiler that builds artifacts here: that of the variable
    CXX, if it is set."""
    from engines.lanes import compiler, version_of

    try:
        words = compiler(platform.machine())
    except EngineError as error:
        cure = "install g++ (or set CXX): the engines lanes and aoti compile with it"
        return Finding("C++ compiler", "missing", str(error), cure)
    return Finding("C++ compiler", "ok", version_of(words))


def _check_cpu_level() -> Finding:
    """Returns which levels of x86-64 this host runs, or what it lacks for the lowest."""
    levels = host_cpu_levels()
    if levels:
        return Finding("CPU level", "ok", f"{levels[0]} (runs {', '.join(levels)})")
    lacking = missing_features("x86-64-v2")
    return Finding("CPU level", "warning", f"below x86-64-v2: lacks {lacking}")


def _check_optional(module: str, extra: str) -> Finding:
    """Returns whether the library `module` is installed, which `extra` of soa-pipeline needs."""
    try:
        installed = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # for a.b, if there is no a
        installed = False
    if installed:
        return Finding(module, "ok", "installed")
    return Finding(module, "warning", "not installed", f"pip install 'soa-pipeline[{extra}]'")


def _check_disk() -> Finding:
    """Returns how much space the disk of the current folder has left. `_ENOUGH_GB` or less is a
    warning."""
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    text = f"{free:.1f} GB free here"
    if free > _ENOUGH_GB:
        return Finding("disk", "ok", text)
    return Finding("disk", "warning", text, "free some space")


def _check_registry(registry: Registry) -> Finding:
    """Returns whether the registry answers. If there is none yet, this is only a warning."""
    try:
        models = registry.list()
    except RegistryError as error:
        status: Status = "warning" if isinstance(error, NoRegistryError) else "missing"
        return Finding("registry", status, str(error), "check --registry")
    return Finding("registry", "ok", f"{registry.shown}, {len(models)} models")
