"""The origin of an artifact: tools, host, source revision, and a digest of soa-pipeline's code."""

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
from soa.declared import find_installed
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
    """The versions, by name, of soa-pipeline, of packages of engines, of the libraries that a build
    uses, and of the compiler. What is not installed is left out."""
    versions = {"soa-pipeline": __version__}
    packages = [declared.package for declared in find_installed("engines").values()]
    versions |= dict(package.rsplit(" ", 1) for package in packages)  # each is "name version"
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
    """A description of this machine: processor, CPU levels, architecture and kernel."""
    return {
        "cpu": _read_cpu_name(),
        "cpu_levels": ", ".join(host_cpu_levels()),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
    }


@cache
def code_digest() -> str:
    """A digest of soa-pipeline's own code, in those of its folders that an artifact depends on."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for folder in _CODE:
        sources = (path for path in (root / folder).rglob("*") if path.suffix in _SUFFIXES)
        for path in sorted(sources):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())  # trusted
    return digest.hexdigest()


def make_provenance(config: Config, config_path: Path, steps: Mapping[str, float]) -> Provenance:
    """Make the record of origin for a manifest. `steps`: the seconds of each step of the run.

    The seconds are added up by stage, the first word of a step's name. The source revision is the
    commit of the git repository that holds the config; None if there is no such repository.
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
    """Read the name of the processor from Linux; elsewhere, ask Python for it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []  # trusted
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _run_command(*command: str) -> str | None:
    """Run a command, and return what it prints. Returns None if it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, timeout=30
    )
    return result.stdout if result.returncode == 0 else None
