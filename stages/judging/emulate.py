"""Emulate: compare an artifact with the reference, for a device that this host does not have.

An artifact for another processor runs under qemu. A GPU's kernel runs on an emulated driver
(engines/native/emulated), which executes the same source compiled as C++ for the CPU. Both are
bound and judged by the test mode of the C++ library (engines/native/library/prove.cpp).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engines.errors import MORE_MEMORY, EngineError, is_out_of_memory
from engines.lanes import HEADERS, compiler, family, run_compiler
from engines.target import Target, torch_runs
from registry.bundle import CARD
from registry.store import cache_root
from runtime.checked import Deviation
from runtime.opening import choose_digest_case
from soa.signature_lines import describe
from stages.judging.validate import Trial
from stages.reference import Reference
from stages.reports import NO_MEMORY, ValidationReport

_NATIVE = Path(__file__).parents[2] / "engines" / "native"
_SOURCES = ("soa_runner.cpp", "library/reference.cpp", "library/prove.cpp")
_SYSROOT = "/usr/{machine}-linux-gnu"
_LONGEST = 300  # characters of an emulator's message
_CODES = {"deviation": "candidate-deviates", "deviation-memory": "candidate-elsewhere"}
"""Codes of the errors of `prove` about answers, and the code that a candidate gets for each."""

_DRIVERS = {"cuda": "libcuda.so.1", "rocm": "libamdhip64.so"}
_KERNEL = (
    "-std=c++20", "-O2", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fno-strict-aliasing", "-w",
)  # fmt: skip
_FMA = {"x86_64": ("-mfma", "-mavx2")}


@dataclass(frozen=True)
class Emulator:
    """What runs a target's artifacts in place of its device.

    `how` is a phrase for reports, such as `under qemu-aarch64`. `machine` is the architecture for
    which the program `prove` is compiled; `command` precedes it, and is empty if it runs directly.
    `prove` opens the artifact on `device`, with the variables of `environment`.
    """

    how: str
    machine: str
    command: tuple[str, ...] = ()
    device: str = "cpu"
    environment: Mapping[str, str] = field(default_factory=dict)


def emulator_of(target: Target, artifact: Path, folder: Path) -> Emulator:
    """The emulator of a target. If it needs files for the artifact, these are written into
    `folder`.

    Raises EngineError, which says what is missing on this host and how to install it.
    """
    return _find_qemu(target) if target.device == "cpu" else _build_driver(target, artifact, folder)


def _build_driver(target: Target, artifact: Path, folder: Path) -> Emulator:
    """Build the emulated driver and an artifact's kernel, both for the CPU, in `folder`.

    The kernel's source is compiled as C++. The driver is linked under the name of the GPU's own
    library, so that `prove` loads it instead. Raises EngineError if a compiler is missing.
    """
    machine = family(target)
    compile_command = compiler(machine)
    options = [*_KERNEL, *_FMA.get(machine, ()), "-I", str(HEADERS), "-x", "c++"]
    source, out = str(artifact / "network.cu"), folder / "kernel.so"
    run_compiler([*compile_command, *options, source, "-o", str(out)], folder, out)
    library = _build_once(
        f"driver-{machine}", compile_command, ("emulated/driver.cpp",), ("-shared", "-fPIC")
    )
    (folder / _DRIVERS[target.device]).symlink_to(library)
    shutil.copyfile(artifact / "network.image", folder / "image")
    environment = {
        "LD_LIBRARY_PATH": str(folder),
        "SOA_EMULATED": str(folder),
        "SOA_EMULATED_VENDOR": target.device,
        "SOA_EMULATED_ARCH": str(_architecture_number(target.arch)),
    }
    return Emulator("on a driver for the CPU", machine, (), "cuda:0", environment)


def _architecture_number(arch: str) -> int:
    """The number by which a driver names an architecture: `sm_90 -> 90`, `gfx942 -> 94`,
    `gfx1100 -> 110`. It is ten times the major version, plus the minor version."""
    if arch.startswith("sm_"):
        return int(arch[3:].rstrip("abcdefgh"))
    # gfx<major><minor><stepping>, the last two of one hexadecimal digit each.
    return 10 * int(arch[3:-2]) + int(arch[-2], 16)


def _find_qemu(target: Target) -> Emulator:
    """Find qemu for a CPU target and, if it is another machine than this host, a C library for it.
    Raises EngineError if one of them is missing, or qemu cannot emulate the target."""
    machine = family(target)
    qemu = shutil.which(f"qemu-{machine}")
    if qemu is None:
        raise EngineError(f"qemu-{machine} is not here: apt-get install qemu-user")
    if target.arch == "x86-64-v4":
        raise EngineError("qemu has no AVX-512")
    if machine == platform.machine():
        return Emulator(f"under qemu-{machine}", machine, (qemu, "-cpu", "max"))
    sysroot = Path(_SYSROOT.format(machine=machine))
    if not any(sysroot.glob("lib*/ld-linux*")):
        package = "libc6-arm64-cross" if machine == "aarch64" else "libc6-amd64-cross"
        raise EngineError(f"no C library for {machine} in {sysroot}: apt-get install {package}")
    return Emulator(f"under qemu-{machine}", machine, (qemu, "-L", str(sysroot)))


def how_cpu_target_runs(target: Target) -> str:
    """How a CPU target is emulated on this host, or a sentence about what is missing for that.
    Empty if this host runs the target itself, and for targets of GPUs."""
    if target.device != "cpu" or torch_runs(target):
        return ""
    try:
        return _find_qemu(target).how
    except EngineError as error:
        return str(error)


def emulate_candidate(
    trial: Trial,
    folder: Path,
    timeout_s: float,
    target: Target,
    *,
    emulator: Emulator | None = None,
) -> ValidationReport:
    """Validate an artifact on an emulator, with all cases of the reference, in a separate process.

    `folder` is for scratch files. `emulator` is used instead of the target's own, if it is given.
    If the target has no emulator here, the report says that the artifact compiles, and what is
    missing.
    """
    begun = time.monotonic()
    name = trial.engine
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        try:
            emulator = emulator or emulator_of(target, trial.file.parent, Path(scratch))
            program = _build_prove(emulator.machine)
        except EngineError as error:
            why = f"{target} was not run: {error}"
            if is_out_of_memory(error):
                return ValidationReport.failed(name, why, code=NO_MEMORY)
            return ValidationReport.without_device(name, "compiles", why)
        contract, answers = Path(scratch) / "contract.json", Path(scratch) / "answers"
        data = trial.to_dict()
        contract.write_text(json.dumps({key: data[key] for key in ("signature", "tolerances")}))
        cases: list[Mapping[str, int]] = list(Reference.load(trial.reference).cases)
        arguments = [
            _copy_with_card(trial, Path(scratch)), emulator.device, contract,
            trial.reference.absolute(), cases.index(choose_digest_case(cases)), answers,
        ]  # fmt: skip
        command = [*emulator.command, str(program), *map(str, arguments)]
        try:
            completed = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, errors="replace",
                env={**os.environ, **emulator.environment},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            why = f"{emulator.how}: no answer within {timeout_s:g} s"
            return ValidationReport.failed(name, why, code="candidate-timeout")
        if completed.returncode != 0:
            return _report_failed_run(name, emulator, completed)
        bits = hashlib.sha256(answers.read_bytes()).hexdigest()  # trusted
    why = f"validated {emulator.how}; no {target} has run it"
    return ValidationReport.without_device(
        name,
        "emulated",
        reason=why,
        worst=_parse_worst(completed.stdout.splitlines()),
        seconds=time.monotonic() - begun,
        bits=bits,
    )


def emulator_on_this_gpu(target: Target) -> Emulator:
    """An Emulator that runs artifacts on this host's own GPU, through its driver. It is for GPUs
    that the installed torch does not support. Raises EngineError if there is no C++ compiler."""
    machine = family(target)
    _build_prove(machine)
    return Emulator("on this GPU", machine, device="cuda:0")


def _copy_with_card(trial: Trial, scratch: Path) -> Path:
    """Copy an artifact into the folder `scratch`, and add the card that packaging will give it. The
    card describes the calling convention to `prove`. Returns the folder of the copy."""
    artifact = scratch / "artifact"
    artifact.mkdir()
    for file in trial.file.parent.iterdir():
        if file.is_file():
            shutil.copyfile(file, artifact / file.name)
    (artifact / CARD).write_text(describe(trial.signature, trial.tile or None))
    return artifact


def _report_failed_run(
    name: str, emulator: Emulator, completed: subprocess.CompletedProcess[str]
) -> ValidationReport:
    """The report of a run of `prove` that failed, from its exit status and the last line that it
    printed: the artifact is refused for its answers, or it failed or crashed."""
    line = (completed.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if completed.returncode == 1:
        text, _, error_code = line.removesuffix("]").rpartition(" [")
        if error_code in _CODES:
            why = f"{emulator.how}: {text[:_LONGEST]}"
            return ValidationReport.refused(name, why, _CODES[error_code])
        code = NO_MEMORY if is_out_of_memory(RuntimeError(line)) else "candidate-failed"
        return ValidationReport.failed(name, f"{emulator.how}: {line[:_LONGEST]}", code=code)
    # A signal ends the process itself (-signal), or qemu's guest (128 + signal, as in a shell).
    number = -completed.returncode if completed.returncode < 0 else completed.returncode - 128
    if number == signal.SIGKILL:
        why = f"killed by SIGKILL, as the kernel does where memory runs out: {MORE_MEMORY}"
        return ValidationReport.failed(name, f"{emulator.how}: {why}", code=NO_MEMORY)
    why = f"exit status {completed.returncode}"
    if number in set(signal.Signals):
        why = f"killed by {signal.Signals(number).name}"
    why = f"{emulator.how}: {why}: {line[:_LONGEST]}"
    return ValidationReport.failed(name, why, code="candidate-crashed")


def _parse_worst(lines: Sequence[str]) -> dict[str, Deviation]:
    """Read the worst deviation of each output from the lines that `prove` prints, one an output:
    `output NAME ELEMENTS OUTSIDE MAX_ABS MAX_REL`, where ELEMENTS and OUTSIDE are counts."""
    worst: dict[str, Deviation] = {}
    for line in lines:
        word, output, elements, outside, largest, relative = line.split(" ")
        assert word == "output"
        worst[output] = Deviation(
            elements=int(elements),
            max_abs=float(largest),
            max_rel=float(relative),
            outside=int(outside) / max(1, int(elements)),
        )
    return worst


def _build_prove(machine: str) -> Path:
    """Build the program `prove` for a machine, unless this host's cache has it. Returns its path.
    Raises EngineError if it cannot be compiled."""
    flags = ("-ldl", "-lpthread")
    return _build_once(f"prove-{machine}", compiler(machine), _SOURCES, flags)


def _build_once(
    name: str, compile_command: Sequence[str], sources: Sequence[str], flags: Sequence[str]
) -> Path:
    """Compile a program or a library from `sources`, unless this host's cache has it already.

    `sources` are relative to engines/native. The path that is returned contains a digest of the
    command and of all files there, so that a change of one of them builds it again.
    """
    # One translation unit reads the headers once, and takes two thirds of the time.
    unit = "".join(f'#include "{_NATIVE / source}"\n' for source in sources)
    includes = [f"-I{_NATIVE / folder}" for folder in (".", "include", "library")]
    command = [*compile_command, "-std=c++17", "-O1", *includes]
    key = hashlib.sha256("\0".join((*command, *flags, unit)).encode())
    for path in sorted((*_NATIVE.rglob("*.h"), *_NATIVE.rglob("*.hpp"), *_NATIVE.rglob("*.cpp"))):
        key.update(path.read_bytes())  # trusted
    file = cache_root() / "emulators" / f"{name}-{key.hexdigest()[:16]}"
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with _lock_build(file), tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        if not file.is_file():
            out, source = Path(scratch) / name, Path(scratch) / "whole.cpp"
            source.write_text(unit)
            run_compiler([*command, str(source), "-o", str(out), *flags], Path(scratch), out)
            os.replace(out, file)
    return file


@contextlib.contextmanager
def _lock_build(file: Path) -> Iterator[None]:
    """Hold a lock, so that no other process builds `file` meanwhile.

    Several targets may be emulated at the same time and need the same program: the first builds it.
    """
    with (file.parent / f".{file.name}.lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: each builds it
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
