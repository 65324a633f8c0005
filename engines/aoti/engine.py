"""The `aoti` engine: AOTInductor native code for one target, opened from its unpacked files."""

from __future__ import annotations

import json
import platform
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import torch

from engines.aoti.weights import writable, write_weights
from engines.base import FACTS, Engine, Executable, Portable
from engines.errors import EngineError
from engines.exported import load_program, quiet_torch
from engines.native import NativeExecutable
from engines.processes import require_openmp
from engines.target import Target

# Bits per vector that Inductor may use; 1 turns its own vectorisation off, since it knows none
# below AVX2.
_SIMD_BITS = {"x86-64-v2": 1, "x86-64-v3": 256, "x86-64-v4": 512}
_MARCH = {"aarch64": "armv8-a"}
TARGET = "target.txt"
# Where set, Inductor packs weights in layouts of its own, inside the library.
_PACKS = ("max_autotune", "freezing")
_CONSTANTS_INSIDE = "aot_inductor.package_constants_in_so"


class _TorchRunner:
    """torch's own runner, for artifacts that need its proxy executor."""

    def __init__(self, runner: Any) -> None:
        self._run = runner.run

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        require_openmp(torch.get_num_threads())
        self._run(list(arguments))


class AotiEngine(Engine):
    """`preset`: Inductor configuration that comes before the user's options."""

    def __init__(self, name: str, preset: Mapping[str, Any]) -> None:
        self.name = name
        self._preset = dict(preset)

    def rewritten(self, program: torch.export.ExportedProgram) -> Mapping[str, Any]:
        """What an engine changes in the program, in place, and the settings that go with it.

        Raises EngineError where it has nothing to change.
        """
        return {}

    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """Options: `threads` (1: the caller's thread does the work), any Inductor configuration."""
        files = self._compile(source, target, options, out)
        (out / TARGET).write_text(f"soa-target 1\n{target}\n")  # the native runner asks it
        if target.device == "cpu":
            return [*files, TARGET]
        built = _inductor_configs(target, {**self._preset, **options})
        (out / FACTS).write_text(json.dumps({"host_code": built["cpp.march"]}))
        return [*files, TARGET, FACTS]

    def _compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        # Inductor folds constants only where no gradient can be asked for.
        with quiet_torch(), torch.no_grad():
            program = load_program(source.program)
            if target.device != "cpu":
                from torch.export.passes import move_to_device_pass

                program = move_to_device_pass(program, "cuda")
            settings = {**self._preset, **self.rewritten(program), **options}
            configs = _inductor_configs(target, settings)
            if target.device != "cpu" or any(configs.get(name) for name in _PACKS):
                return _build(program, configs, out)
            files = _build(program, {**configs, _CONSTANTS_INSIDE: False}, out)
            weights = _constants(program, out / files[0])
            if weights is not None and not needs_proxy_executor(out / files[0]):
                library = (out / files[0]).rename((out / files[0]).with_suffix(".bare.so"))
                return [library.name, *files[1:], *write_weights(weights, out)]
            for file in files:
                (out / file).unlink()
            return _build(program, configs, out)

    def portable_file(self, source: Portable) -> Path | None:
        return None

    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        """Through the native runner; through torch's where an operation has no C shim."""
        if not needs_proxy_executor(file):
            return NativeExecutable(file, device, instances, threads)
        from torch._C import _aoti

        try:
            if device.type == "cpu":
                return _TorchRunner(_aoti.AOTIModelContainerRunnerCpu(str(file), 1))
            return _TorchRunner(
                _aoti.AOTIModelContainerRunnerCuda(str(file), 1, str(device), str(file.parent))
            )
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise EngineError(f"{file.name} cannot be opened as native code: {reason}") from error


def needs_proxy_executor(library: Path) -> bool:
    """Whether the library calls torch's proxy executor: for operations without a C shim."""
    try:
        with library.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
            return content.find(b"aoti_torch_proxy_executor_call_function") >= 0
    except (OSError, ValueError) as error:
        raise EngineError(f"{library.name} cannot be read: {error}") from error


def _build(program: torch.export.ExportedProgram, configs: dict[str, Any], out: Path) -> list[str]:
    """Compile into `out`, unpacked; the library comes first."""
    package = out / "package.pt2"
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(package), inductor_configs=configs
    )
    files = _unpack(package, out)
    package.unlink()
    return files


def _constants(
    program: torch.export.ExportedProgram, library: Path
) -> dict[str, torch.Tensor] | None:
    """The tensors a library without constants asks for, by its own names for them.

    None where they cannot lie beside it: Inductor made some itself (packed or folded weights), or
    one is of a dtype that the format does not hold.
    """
    from torch._C import _aoti

    values = {**program.state_dict, **program.constants}
    runner = _aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    names = runner.get_constant_names_to_original_fqns()
    if not set(names.values()) <= values.keys():
        return None
    found = {name: values[original] for name, original in names.items()}
    return found if writable(found) else None


def cpu_code(target: Target) -> dict[str, Any]:
    """Inductor's settings for what runs on a CPU. By itself it builds that for this very host.

    Of a GPU's artifact that is the code that launches kernels: built for the lowest level, so that
    any host with such a GPU runs it.
    """
    arch = target.arch
    if target.device != "cpu":
        arch = "aarch64" if platform.machine() == "aarch64" else "x86-64-v2"
    configs: dict[str, Any] = {"cpp.march": _MARCH.get(arch, arch)}
    if arch in _SIMD_BITS:
        configs["cpp.simdlen"] = _SIMD_BITS[arch]
    return configs


def _inductor_configs(target: Target, options: Mapping[str, Any]) -> dict[str, Any]:
    configs = cpu_code(target)
    if target.device == "cpu":
        configs["cpp.threads"] = 1
    for key, value in options.items():
        configs["cpp.threads" if key == "threads" else key] = value
    return configs


def _unpack(package: Path, out: Path) -> list[str]:
    """Keep what runs (the library, its metadata, GPU kernels), not the generated sources."""
    libraries: list[str] = []
    others: list[str] = []
    with zipfile.ZipFile(package) as archive:
        for entry in archive.namelist():
            name = Path(entry).name
            if "/aotinductor/" not in entry or Path(name).suffix in {".cpp", ".h", ".o", ""}:
                continue
            with archive.open(entry) as stored, (out / name).open("wb") as unpacked:
                shutil.copyfileobj(stored, unpacked)
            (libraries if name.endswith(".so") else others).append(name)
    if len(libraries) != 1:
        raise EngineError(f"expected one library in the package, found {libraries}")
    (out / libraries[0]).chmod(0o755)
    return [*libraries, *sorted(others)]


ENGINE = AotiEngine("aoti", {})
