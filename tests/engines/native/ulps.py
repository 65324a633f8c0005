"""The errors of the shim's functions on all 2^32 floats: `python -m tests.engines.native.ulps`.

They are measured against the C library's double precision, whose own error is a billionth of the
measured ones. It takes an hour on one core; `ulps 97 exp log` checks every 97th float, and only
these two functions. docs/howto/standalone.md has the results.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.engines.native import sanitize


@dataclass(frozen=True)
class Error:
    """The worst error in units in the last place, and how many values are wrong in kind or bits."""

    ulps: float
    wrong: int


def measured(program: Path, *words: str) -> dict[str, Error]:
    """The program's results for each function: `ulps STEP`, or `doubles`."""
    done = subprocess.run([program, *words], check=True, stdout=subprocess.PIPE, text=True)
    lines = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    return {name: Error(float(ulps), int(wrong)) for name, ulps, _, _, wrong, *_ in lines}


def main(step: str = "1", *functions: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        program = sanitize.build_functions(Path(scratch))
        chosen = [[name] for name in functions] or [[]]
        return max(subprocess.run([program, "ulps", step, *name]).returncode for name in chosen)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
