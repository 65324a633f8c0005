"""Tolerances of outputs: the defaults by dtype, and those that a version was validated with."""

from __future__ import annotations

from registry.bundle import Manifest
from registry.bundle import Tolerance as Tolerance
from runtime.errors import LoadError
from soa.signature import Signature


def default_tolerance(dtype: str) -> Tolerance:
    """Return the default tolerance of an output with this dtype.

    It allows for the rounding of sums in another order. Integers must be equal.
    """
    table = {
        "float64": Tolerance(1e-10, 1e-9),
        "float32": Tolerance(1e-5, 1e-4),
        "float16": Tolerance(2e-3, 5e-3),
        "bfloat16": Tolerance(1.6e-2, 1.6e-2),
    }
    return table.get(dtype, Tolerance(0.0, 0.0))


def recorded_tolerances(manifest: Manifest) -> dict[str, Tolerance]:
    """Return the tolerances that a version was validated with, by output.

    Raises LoadError if one is missing.
    """
    for bound in Signature.from_dict(manifest.signature).outputs:
        if bound.name not in manifest.tolerances:
            raise LoadError(f"{manifest.name}: its manifest has no tolerance for {bound.name!r}")
    return dict(manifest.tolerances)
