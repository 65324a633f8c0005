"""The errors of elementary functions on all 2^32 floats: `python -m tests.engines.lanes.ulps`.

Measured are the functions of `lanes` (`lanes_exp`) and those of the shim (`exp`). They are measured
against the C library's double precision, whose own error is a billionth of the measured ones.
It takes hours on one core; `ulps 97 exp lanes_exp` checks every 97th float, and only these two. The
program fails if an error is larger than docs/concepts/lanes.md and docs/howto/standalone.md say.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.engines.native import sanitize

# In units in the last place. Functions that are not listed are rounded from double precision.
LIMITS = {
    "exp": 1.02,
    "lanes_exp": 1.1,
    "lanes_expm1": 1.5,
    "lanes_log": 0.9,
    "lanes_log1p": 0.9,
    "lanes_tanh": 4.6,
    "lanes_erf": 6.0,
    "lanes_sigmoid": 2.5,
}
ROUNDED = 0.51


@dataclass(frozen=True)
class Error:
    """The worst error in ulps, its argument, and how many values are wrong in kind or bits."""

    ulps: float
    at: float
    wrong: int

    def within(self, name: str) -> bool:
        """Whether it is one that the documentation allows the function with this name."""
        return self.wrong == 0 and self.ulps <= LIMITS.get(name, ROUNDED)


def measured(program: Path, *words: str) -> dict[str, Error]:
    """The results of functions.cpp for each function: of `ulps STEP [FUNCTION]` or `doubles`."""
    done = subprocess.run([program, *words], check=True, stdout=subprocess.PIPE, text=True)
    lines = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    return {
        name: Error(float(ulps), float(at), int(wrong)) for name, ulps, at, _, wrong, *_ in lines
    }


def main(step: str = "1", *functions: str) -> int:
    """Measures all functions, or these, at every `step`-th float; 1 if an error is too large."""
    errors: dict[str, Error] = {}
    with tempfile.TemporaryDirectory() as scratch:
        program = sanitize.build_functions(Path(scratch))
        for words in [[name] for name in functions] or [[]]:  # no name: all functions
            errors |= measured(program, "ulps", step, *words)
    for name, error in errors.items():
        verdict = "" if error.within(name) else "  TOO FAR OFF"
        print(f"{name:13} {error.ulps:.4f} at {error.at:.9g}, {error.wrong} wrong{verdict}")
    return int(not all(error.within(name) for name, error in errors.items()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
