"""Finds and runs C++ compilers for a target, also for another processor family."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from engines.errors import EngineError
from engines.target import Target

# Floating-point arithmetic as written in the source. Flags in the environment are ignored.
_FLAGS = (
    "-O3", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti", "-nodefaultlibs",
    "-Wno-psabi", "-Wno-ignored-attributes", "-Wno-unknown-warning-option",
)  # fmt: skip
_TIMEOUT_S = 1800.0


def family(target: Target) -> str:
    """The processor family that runs a target's code, as in `uname -m`. For a GPU: this host's."""
    if target.device != "cpu":
        return platform.machine()
    return "x86_64" if target.arch.startswith("x86-64") else "aarch64"


def compilers(machine: str) -> Iterator[tuple[str, ...]]:
    """The installed compilers for a processor family, best first. For this host's: $CXX first."""
    here = machine == platform.machine()
    names = [os.environ.get("CXX"), "g++", "clang++"] if here else [f"{machine}-linux-gnu-g++"]
    for name in names:
        words = tuple(shlex.split(name)) if name else ()
        if words and shutil.which(words[0]):
            yield words
    if find_spec("ziglang") is not None:
        other = () if here else ("-target", f"{machine}-linux-gnu.2.28")
        yield (sys.executable, "-m", "ziglang", "c++", *other)


def compiler(machine: str) -> tuple[str, ...]:
    """The first of `compilers`; EngineError says how to install one."""
    if (found := next(compilers(machine), None)) is not None:
        return found
    if machine == platform.machine():
        raise EngineError("no C++ compiler is here: install g++ or clang++, or pip install ziglang")
    package = f"g++-{machine.replace('_', '-')}-linux-gnu"
    raise EngineError(
        f"no C++ compiler for {machine} is here: apt-get install {package}, or pip install ziglang"
    )


def compile_library(source: Path, include: Path, target: Target, out: Path) -> None:
    """Compile `source` to the shared library `out`. EngineError has the compiler's message."""
    command = [*compiler(family(target)), *_FLAGS, *_machine(target), "-I", str(include)]
    run_compiler([*command, "-o", str(out), source.name, "-lc"], source.parent, out)


def run_compiler(command: Sequence[str], folder: Path, out: Path) -> str:
    """Run a compiler in a folder; returns its stderr. EngineError if it failed or made no `out`."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"{name} did not end within {_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise EngineError(f"{name} cannot be run: {error.strerror}") from None
    if done.returncode != 0 or not out.is_file():
        raise EngineError(f"{name} failed: {_said(done.stderr.splitlines())}")
    return done.stderr


def _machine(target: Target) -> list[str]:
    if target.arch == "aarch64":
        return ["-march=armv8-a"]
    wide = ["-mprefer-vector-width=512"] if target.arch == "x86-64-v4" else []
    return [f"-march={target.arch}", *wide]


def _said(lines: Sequence[str]) -> str:
    """The first line with an error, or else the first line."""
    wrong = [line for line in lines if "error" in line.lower() or "killed" in line.lower()]
    return (wrong or list(lines) or ["it said nothing"])[0].strip()
