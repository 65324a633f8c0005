"""Doctor: what this host can build and run, and what is missing for the rest."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines.kinds import host_cpu_levels, missing_flags
from registry.errors import RegistryError
from registry.store import Registry

Status = Literal["ok", "warning", "missing"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at: `found` says what is there, `cure` what to do where it is not well."""

    what: str
    status: Status
    found: str
    cure: str = ""


def examine(registry: Registry) -> list[Finding]:
    """Look at Python, torch, the compiler, the CPU, GPUs, optional engines and the registry."""
    return [
        Finding("Python", "ok", platform.python_version()),
        *_torch(),
        _compiler(),
        _cpu(),
        *_optional(),
        _disk(),
        _registry(registry),
    ]


def _torch() -> list[Finding]:
    try:
        import torch
    except ImportError as error:
        return [
            Finding("torch", "missing", str(error), "pip install torch"),
            Finding("GPU", "warning", "torch is missing"),
        ]
    gpu = Finding("GPU", "warning", "torch sees none", "only CPU targets can be built here")
    if torch.cuda.is_available():
        gpu = Finding("GPU", "ok", torch.cuda.get_device_name(0))
    return [Finding("torch", "ok", str(torch.__version__)), gpu]


def _compiler() -> Finding:
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        return Finding(
            "C++ compiler", "missing", f"no {name} on PATH",
            "install g++ (or set CXX): the aoti engine compiles with it",
        )  # fmt: skip
    text = subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout
    return Finding("C++ compiler", "ok", text.splitlines()[0] if text else name)


def _cpu() -> Finding:
    levels = host_cpu_levels()
    if not levels:
        lacking = ", ".join(missing_flags("x86-64-v2"))
        return Finding("CPU level", "warning", f"below x86-64-v2: lacks {lacking}")
    return Finding("CPU level", "ok", f"{levels[0]} (runs {', '.join(levels)})")


def _optional() -> Iterator[Finding]:
    extras = {
        "onnxruntime": "cpu",
        "onnxscript": "onnx",
        "torch_tensorrt": "cuda",
        "mlflow.server": "mlflow",
        "uproot": "data",
    }
    for module, extra in extras.items():
        there = False
        with suppress(ModuleNotFoundError):
            there = importlib.util.find_spec(module) is not None
        if there:
            yield Finding(module, "ok", "installed")
        else:
            cure = f"pip install 'soa-pipeline[{extra}]'"
            yield Finding(module, "warning", "not installed", cure)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    found = f"{free:.1f} GB free here"
    if free > 2:
        return Finding("disk", "ok", found)
    return Finding("disk", "warning", found, "free some space")


def _registry(registry: Registry) -> Finding:
    try:
        models = registry.list()
    except RegistryError as error:
        return Finding("registry", "missing", str(error), "check --registry")
    return Finding("registry", "ok", f"{registry!r}, {len(models)} models")
