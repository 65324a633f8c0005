"""The errors of `lanes`' functions on all 2^32 floats: `python -m tests.engines.lanes.ulps`.

They are measured against the C library's double precision, whose own error is a billionth of the
measured ones. A number as argument is the step: `ulps 97` checks every 97th float. The program
fails if an error is larger than docs/concepts/lanes.md says.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engines.lanes.planning.source_file import HEADERS

# In units in the last place. Functions that are not listed are rounded from double precision.
LIMITS = {
    "exp": 1.1,
    "expm1": 1.5,
    "log": 0.9,
    "log1p": 0.9,
    "tanh": 4.6,
    "erf": 6.0,
    "sigmoid": 2.5,
}
ROUNDED = 0.51


@dataclass(frozen=True)
class Error:
    """The worst error in ulps, its argument, and how often NaN, infinity or the sign is wrong."""

    ulps: float
    at: float
    wrong: int

    def within(self, name: str) -> bool:
        return self.wrong == 0 and self.ulps <= LIMITS.get(name, ROUNDED)


def measured(folder: Path, step: int) -> dict[str, Error]:
    program = folder / "functions"
    source = Path(__file__).with_name("functions.cpp")
    flags = ("-O2", "-std=c++20", "-march=x86-64-v3", "-ffp-contract=off", "-w")
    subprocess.run(["g++", *flags, f"-I{HEADERS}", source, "-o", program], check=True)
    done = subprocess.run([program, str(step)], check=True, stdout=subprocess.PIPE, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: Error(float(ulps), float(at), int(wrong)) for name, ulps, at, wrong in lines}


def main(step: str = "1") -> int:
    with tempfile.TemporaryDirectory() as scratch:
        found = measured(Path(scratch), int(step))
    for name, error in found.items():
        said = "" if error.within(name) else "  TOO FAR OFF"
        print(f"{name:8} {error.ulps:.4f} at {error.at:.9g}, {error.wrong} wrong in kind{said}")
    return int(not all(error.within(name) for name, error in found.items()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
