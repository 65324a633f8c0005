"""The polynomial of `erfc` in functions.h is derived here from erfc itself."""

from __future__ import annotations

import re

from mpmath import chebyfit, mp, mpf

from engines.lanes.planning.source_file import HEADERS


def scaled_erfc(v: mpf) -> mpf:
    """erfc(z) exp(z^2) / t, where t = 4 / (4 + z) = v + 9/16."""
    t = v + mpf(9) / 16
    z = 4 / t - 4
    return mp.erfc(z) * mp.exp(z * z) / t


def test_the_coefficients_are_those_of_a_chebyshev_fit() -> None:
    text = (HEADERS / "functions.h").read_text()
    (inside,) = re.findall(r"polynomial\(t - splat\(0\.5625\),([^;]+)\);", text)
    coefficients = [float(number) for number in inside.split(",")]
    with mp.workdps(60):
        ends = [-mpf(7) / 16, mpf(7) / 16]  # of v: t is between 1/8 and 1, z between 28 and 0
        fitted, error = chebyfit(scaled_erfc, ends, len(coefficients), error=True)
        assert error < 1e-17
        assert coefficients == [float(power) for power in reversed(fitted)]  # highest power last
