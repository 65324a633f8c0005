"""The origin of an artifact: tools, host, source revision, and a digest of our own code."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engines.kinds import host_cpu_levels
from pipeline.config import Config
from registry.bundle import Provenance
from soa.declared import of_packages
from soa_pipeline import __version__

_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "pydantic",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "mlflow-skinny",
)
# The folders whose code makes, checks and runs an artifact.
_CODE = ("soa", "engines", "runtime", "stages")
_SUFFIXES = {".py", ".cpp", ".h", ".hpp"}


@cache
def tools() -> dict[str, str]:
    """The versions of the packages and the compiler that a build uses, with those of engines."""
    versions = {"soa-pipeline": __version__}
    packages = [declared.package for declared in of_packages("engines").values()]
    versions |= dict(package.rsplit(" ", 1) for package in packages)  # by name: its version
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # the build does not use it
            continue
    compiler = _run_command("g++", "--version")
    if compiler:
        versions["g++"] = compiler.splitlines()[0].split()[-1]
    return versions


@cache
def host() -> dict[str, str]:
    """The machine: processor, CPU levels, architecture and kernel."""
    return {
        "cpu": _read_cpu_name(),
        "cpu_levels": ", ".join(host_cpu_levels()),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
    }


@cache
def code_digest() -> str:
    """A digest of our code in the folders that an artifact depends on."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for folder in _CODE:
        sources = (path for path in (root / folder).rglob("*") if path.suffix in _SUFFIXES)
        for path in sorted(sources):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())  # ours
    return digest.hexdigest()


def make_provenance(config: Config, config_path: Path, steps: Mapping[str, float]) -> Provenance:
    """The record for a manifest. `steps`: the steps of the run, with the seconds of each.

    The source revision is the commit of the git repository that holds the config.
    """
    seconds: dict[str, float] = {}
    for step, took in steps.items():
        stage = step.partition(" ")[0]
        seconds[stage] = seconds.get(stage, 0.0) + took
    folder = str(config_path.resolve().parent)
    commit = _run_command("git", "-C", folder, "rev-parse", "HEAD")
    status = _run_command("git", "-C", folder, "status", "--porcelain") if commit else None
    return Provenance(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        git_commit=commit.strip() if commit else None,
        git_dirty=bool(status) if status is not None else None,
        config_sha256=config.digest(),
        config=config.model_dump(mode="json"),
        tools=tools(),
        host=host(),
        python=platform.python_version(),
        seconds=seconds,
    )


def _read_cpu_name() -> str:
    """The name of the processor, as Linux has it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []  # ours
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _run_command(*command: str) -> str | None:
    """What a command prints; None if it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, timeout=30
    )
    return result.stdout if result.returncode == 0 else None
