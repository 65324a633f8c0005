"""reference: does the reference prove something, that is, are few of its values NaN or infinite?"""

from __future__ import annotations

from collections.abc import Iterable

from registry.promotion.decision import Decision
from registry.promotion.findings import Findings

ORDER = 40


def decide(found: Findings) -> Iterable[Decision]:
    proof = found.proof
    shown, limit = f"not finite {proof.nonfinite:.3g}", f"not finite <= {proof.limit:g}"
    detail = proof.refusal or f"a fraction of {proof.nonfinite:.3g} is NaN or infinite, {limit}"
    yield Decision("reference", proof.refusal is None, shown, limit, detail)
