"""The errors of the shim's functions on all 2^32 floats: `python -m tests.engines.native.ulps`.

Against the C library's double precision, whose own error is a billionth of what is measured. It
takes half an hour on one core; with a number, every so many floats. docs/standalone.md has figures.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.engines.native.sanitize import HERE, NATIVE, compiler


@dataclass(frozen=True)
class Error:
    """The worst error in units in the last place, and how many values are wrong in kind."""

    ulps: float
    wrong: int


def build(folder: Path) -> Path:
    """The program that measures, with the shim's own sources and flags."""
    flags = ("-std=c++17", "-O2", "-mavx2", "-mfma", "-ffp-contract=off", "-fno-builtin")
    program = folder / "shim"
    include = f"-I{NATIVE / 'shim'}"
    subprocess.run(
        [compiler() or "g++", *flags, include, HERE / "shim.cpp", "-o", program], check=True
    )
    return program


def measured(program: Path, *words: str) -> dict[str, Error]:
    """What the program says of each function: `ulps STEP`, or `doubles`."""
    done = subprocess.run([program, *words], check=True, stdout=subprocess.PIPE, text=True)
    lines = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    return {name: Error(float(ulps), int(wrong)) for name, ulps, _, _, wrong, *_ in lines}


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        program = build(Path(scratch))
        return subprocess.run([program, "ulps", sys.argv[1] if sys.argv[1:] else "1"]).returncode


if __name__ == "__main__":
    sys.exit(main())
