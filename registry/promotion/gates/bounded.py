"""latency, memory, size, metrics, shadow: is each number within the bounds of the config?"""

from __future__ import annotations

import math
from collections.abc import Iterable

from registry.promotion.decision import Decision
from registry.promotion.findings import Findings, Measured
from soa.text import number

ORDER = 65


def decide(found: Findings) -> Iterable[Decision]:
    return map(_judged, found.bounded)


def _judged(one: Measured) -> Decision:
    asked: list[tuple[str, float | None, float]] = [
        (">=", one.min, one.value),
        ("<=", one.max, one.value),
    ]
    if one.beside:
        asked += [
            ("drop <=", one.max_drop, one.old - one.value),
            ("rise <=", one.max_rise, one.value - one.old),
        ]
    bounds = [(sign, bound, value) for sign, bound, value in asked if bound is not None]
    passed = math.isfinite(one.value) and all(
        value >= bound if sign == ">=" else value <= bound for sign, bound, value in bounds
    )  # False for NaN
    limit = ", ".join(f"{sign} {number(bound, 6)}" for sign, bound, _ in bounds) or "none"
    shown = number(one.value, 6) + (
        f"; {one.beside} has {number(one.old, 6)}" if one.beside else ""
    )
    why = f": {one.why}" if one.why else ""
    detail = f"{one.what} is {shown}, limit {limit}{why}"
    return Decision(one.gate, passed, shown, limit, detail)
