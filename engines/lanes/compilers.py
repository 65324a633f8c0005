"""The C++ compilers that can build for a target, and how each is called."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from engines.errors import EngineError
from engines.target import Target

# Exact arithmetic as it is written; a line of flags in the environment is not looked at.
_FLAGS = (
    "-O3", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti", "-nodefaultlibs",
    "-Wno-psabi", "-Wno-ignored-attributes", "-Wno-unknown-warning-option",
)  # fmt: skip
_TIMEOUT_S = 1800.0


def compilers() -> Iterator[tuple[str, ...]]:
    """Those that are here, the one that $CXX names first."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        words = tuple(shlex.split(name)) if name else ()
        if words and shutil.which(words[0]):
            yield words
    if find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "c++")


def compile_library(source: Path, include: Path, target: Target, out: Path) -> None:
    """Compile `source` to the shared library `out`; raises EngineError with what was said."""
    found = next(compilers(), None)
    if found is None:
        raise EngineError("no C++ compiler is here: install g++ or clang++, or pip install ziglang")
    command = [
        *found,
        *_FLAGS,
        *_machine(target),
        "-I",
        str(include),
        "-o",
        str(out),
        source.name,
        "-lc",
    ]
    try:
        done = subprocess.run(
            command, cwd=source.parent, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"{found[0]} did not end within {_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise EngineError(f"{found[0]} cannot be run: {error.strerror}") from None
    if done.returncode != 0 or not out.is_file():
        raise EngineError(f"{found[0]} failed: {_said(done.stderr.splitlines())}")


def _machine(target: Target) -> list[str]:
    if target.arch == "aarch64":
        return ["-march=armv8.2-a"]
    wide = ["-mprefer-vector-width=512"] if target.arch == "x86-64-v4" else []
    return [f"-march={target.arch}", *wide]


def _said(lines: Sequence[str]) -> str:
    """The line that says what is wrong."""
    wrong = [line for line in lines if "error" in line.lower() or "killed" in line.lower()]
    return (wrong or list(lines) or ["it said nothing"])[0].strip()
