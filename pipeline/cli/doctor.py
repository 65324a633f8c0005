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
_EXTRAS = {
    "onnxruntime": "cpu",
    "onnxscript": "onnx",
    "torch_tensorrt": "cuda",
    "mlflow.server": "mlflow",
    "uproot": "data",
}


@dataclass(frozen=True)
class Finding:
    """The result of one check: `found` says what there is, `cure` what to do about a problem."""

    what: str
    status: Status
    found: str
    cure: str = ""


def examine(registry: Registry) -> Iterator[Finding]:
    """Look at Python, torch, the compiler, the CPU, GPUs, optional engines and the registry."""
    yield Finding("Python", "ok", platform.python_version())
    yield from _torch()
    yield _compiler()
    yield _cpu_level()
    for module, extra in _EXTRAS.items():
        yield _optional(module, extra)
    yield _disk()
    yield _models(registry)


def _torch() -> Iterator[Finding]:
    """The findings about torch, and about the GPU that it sees."""
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


def _compiler() -> Finding:
    """The C++ compiler that builds artifacts for this host: that of CXX, if it is set."""
    from engines.lanes import compiler, version_of

    try:
        words = compiler(platform.machine())
    except EngineError as error:
        cure = "install g++ (or set CXX): the engines lanes and aoti compile with it"
        return Finding("C++ compiler", "missing", str(error), cure)
    return Finding("C++ compiler", "ok", version_of(words))


def _cpu_level() -> Finding:
    """The levels of x86-64 whose targets this host runs."""
    levels = host_cpu_levels()
    if levels:
        return Finding("CPU level", "ok", f"{levels[0]} (runs {', '.join(levels)})")
    lacking = missing_features("x86-64-v2")
    return Finding("CPU level", "warning", f"below x86-64-v2: lacks {lacking}")


def _optional(module: str, extra: str) -> Finding:
    """Whether the library of an extra is installed."""
    try:
        installed = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # for a.b, if there is no a
        installed = False
    if installed:
        return Finding(module, "ok", "installed")
    return Finding(module, "warning", "not installed", f"pip install 'soa-pipeline[{extra}]'")


def _disk() -> Finding:
    """Whether the disk of the current folder has `_ENOUGH_GB` left."""
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    text = f"{free:.1f} GB free here"
    if free > _ENOUGH_GB:
        return Finding("disk", "ok", text)
    return Finding("disk", "warning", text, "free some space")


def _models(registry: Registry) -> Finding:
    """Whether the registry answers. That it was not made yet is only a warning."""
    try:
        models = registry.list()
    except RegistryError as error:
        status: Status = "warning" if isinstance(error, NoRegistryError) else "missing"
        return Finding("registry", status, str(error), "check --registry")
    return Finding("registry", "ok", f"{registry.shown}, {len(models)} models")
