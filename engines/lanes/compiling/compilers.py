"""Finds and runs C++ compilers for a target, also for another processor family."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from engines.errors import EngineError
from engines.target import Target

# Floating-point arithmetic is as written in the source, and integers wrap around. Flags in the
# environment are ignored.
_FLAGS = (
    "-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fwrapv",
    "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti", "-nodefaultlibs",
    "-Wno-psabi", "-Wno-ignored-attributes", "-Wno-unknown-warning-option",
)  # fmt: skip
_TIMEOUT_S = 1800.0


def family(target: Target) -> str:
    """The processor family that runs a target's host code, as `uname -m` names it. For a GPU target
    this is the family of this host."""
    if target.device != "cpu":
        return platform.machine()
    return "x86_64" if target.arch.startswith("x86-64") else "aarch64"


# What may stand in front of a compiler in CXX, and options of it that change no number.
_LAUNCHERS = ("ccache", "sccache", "distcc", "icecc", "env", "zig")
_HARMLESS = re.compile(
    r"(--sysroot|--gcc-toolchain|--target|-fuse-ld|-fdiagnostics-color|-stdlib)=.+|-B.+|-pipe|-pthread|-m64"
)


def named_compiler() -> tuple[str, ...]:
    """The words of the environment variable CXX; empty if it is not set.

    Raises EngineError if it names no program, or has an option that is not known to be harmless:
    `-ffast-math`, for example, changes numbers, and also how this process's own threads compute.
    """
    try:
        words = tuple(shlex.split(os.environ.get("CXX", "")))
    except ValueError as error:
        raise EngineError(f"CXX={os.environ['CXX']}: {error}: name a compiler") from None
    not_harmless = [word for word in words if not _HARMLESS.fullmatch(word)]
    names = [Path(word).name for word in not_harmless]
    compiler_at = next((i for i, name in enumerate(names) if name not in _LAUNCHERS), 0)
    if options := not_harmless[compiler_at + 1 :]:
        raise EngineError(
            f"CXX has {options[0]!r}, which may change the numbers: give only the compiler, with "
            "--sysroot=, --gcc-toolchain=, --target=, -fuse-ld= or -B if needed"
        )
    if words and shutil.which(words[0]) is None:
        raise EngineError(f"CXX={words[0]}: there is no such program: name another, or unset CXX")
    return words


def compilers(machine: str) -> Iterator[tuple[str, ...]]:
    """Yield the commands of the installed compilers for a processor family, best first. For this
    host's own family, the compiler that $CXX names comes first."""
    is_ours = machine == platform.machine()
    native = [named_compiler(), ("g++",), ("clang++",)]
    for words in native if is_ours else [(f"{machine}-linux-gnu-g++",)]:
        if words and shutil.which(words[0]):
            yield words
    if find_spec("ziglang") is not None:
        crossing = () if is_ours else ("-target", f"{machine}-linux-gnu.2.28")
        yield (sys.executable, "-m", "ziglang", "c++", *crossing)


def compiler(machine: str) -> tuple[str, ...]:
    """The command of the best compiler for a processor family. Raises EngineError if there is none;
    the message says how to install one."""
    if (best := next(compilers(machine), None)) is not None:
        return best
    if machine == platform.machine():
        raise EngineError("no C++ compiler is here: install g++ or clang++, or pip install ziglang")
    package = f"g++-{machine.replace('_', '-')}-linux-gnu"
    raise EngineError(
        f"no C++ compiler for {machine} is here: apt-get install {package}, or pip install ziglang"
    )


def compiler_identity(target: Target) -> str:
    """The command of a target's compiler with its version, for the keys of what it builds. If there
    is no compiler, a text that says so."""
    try:
        words = next(compilers(family(target)), ())
    except EngineError as error:
        return str(error)  # a candidate that needs the compiler fails with it
    return f"{shlex.join(words)}: {version_of(words)}" if words else "no compiler"


@cache
def version_of(words: tuple[str, ...]) -> str:
    """The first line that a compiler prints for `--version`; `unknown` if it prints nothing or
    cannot be run."""
    try:
        done = subprocess.run([*words, "--version"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    lines = done.stdout.decode(errors="replace").splitlines()
    return lines[0] if lines else "unknown"


def compile_library(source: Path, include: Path, target: Target, out: Path, parts: int) -> None:
    """Compile `source` to the shared library `out`. `include` is the folder of header files.

    The parts 0 to `parts` - 1 are compiled at the same time, as far as this process has cores, and
    then linked. If `parts` is 0, the source is compiled as a whole. Raises EngineError with the
    compiler's message.
    """
    command = [*compiler(family(target)), *_FLAGS, *machine_flags(target), "-I", str(include)]
    folder = source.parent
    if not parts:
        run_compiler([*command, "-shared", "-o", str(out), source.name, "-lc"], folder, out)
        return

    def compile_part(part: int) -> str:
        """Compile a part. Returns the name of its object file."""
        object_file = folder / f"part{part}.o"
        options = [f"-DPART={part}", "-c", "-o", object_file.name, source.name]
        run_compiler([*command, *options], folder, object_file)
        return object_file.name

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = [*pool.map(compile_part, range(parts))]
    run_compiler([*command, "-shared", "-o", str(out), *objects, "-lc"], folder, out)


def run_compiler(command: Sequence[str], folder: Path, out: Path) -> str:
    """Run a compiler in a folder. Returns what it wrote to stderr. Raises EngineError if it failed
    or did not make the file `out`."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, timeout=_TIMEOUT_S, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"{name} did not end within {_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise EngineError(f"{name} cannot be run: {error.strerror}") from None
    if done.returncode != 0 or not out.is_file():
        raise EngineError(f"{name} failed: {_first_error(done.stderr.splitlines())}")
    return done.stderr


def machine_flags(target: Target) -> list[str]:
    """The compiler's options that select a CPU target."""
    if target.arch == "aarch64":
        return ["-march=armv8-a"]
    wide = ["-mprefer-vector-width=512"] if target.arch == "x86-64-v4" else []
    return [f"-march={target.arch}", *wide]


def _first_error(lines: Sequence[str]) -> str:
    """The first line of a compiler's output that reports an error, or else the first line."""
    errors = [line for line in lines if "error" in line.lower() or "killed" in line.lower()]
    return [*errors, *lines, "it said nothing"][0].strip()
