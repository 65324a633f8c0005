"""signature: for each policy, is the version signed with one of the policy's keys?"""

from __future__ import annotations

from collections.abc import Iterable

from registry.promotion.decision import Decision
from registry.promotion.findings import Findings

ORDER = 90


def decide(found: Findings) -> Iterable[Decision]:
    check = found.signature
    if check is None:
        return
    if check.error:
        yield Decision("signature", False, "not as asked", check.needed, check.error)
    else:
        detail = f"signed by {check.found}"
        yield Decision("signature", True, check.found, check.needed, detail)
