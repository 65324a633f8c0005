"""approvals: have all persons whom a policy names approved this version?"""

from __future__ import annotations

from collections.abc import Iterable

from registry.promotion.decision import Decision
from registry.promotion.findings import Findings

ORDER = 80


def decide(found: Findings) -> Iterable[Decision]:
    names = found.needed.approvals
    if not names:
        return
    missing = [name for name in names if name not in found.approved_by]
    given = ", ".join(name for name in names if name in found.approved_by) or "none"
    needed = ", ".join(names)
    detail = f"approved by {given}; needed: {needed}"
    if missing:
        detail += f"; missing: {', '.join(missing)} (pipeline approve)"
    yield Decision("approvals", not missing, given, needed, detail)
