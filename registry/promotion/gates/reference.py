"""reference: are few enough values of the reference NaN or infinite?"""

from __future__ import annotations

from collections.abc import Iterable

from registry.promotion.decision import Decision
from registry.promotion.findings import Findings
from soa.text import number

ORDER = 40


def decide(found: Findings) -> Iterable[Decision]:
    proof = found.proof
    shown, limit = f"not finite {number(proof.nonfinite)}", f"not finite <= {proof.limit:g}"
    detail = proof.refusal or f"a fraction of {number(proof.nonfinite)} is NaN or infinite, {limit}"
    yield Decision("reference", proof.refusal is None, shown, limit, detail)
