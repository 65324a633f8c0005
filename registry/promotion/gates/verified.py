"""verified: has each required target run on a device of its kind?"""

from __future__ import annotations

from collections.abc import Iterable

from registry.promotion.decision import Decision
from registry.promotion.findings import Findings

ORDER = 20


def decide(found: Findings) -> Iterable[Decision]:
    if not found.needed.targets:
        detail = "found no target to serve, at least 1 is needed"
        yield Decision("verified", False, "no target", "at least 1", detail)
    for target in found.needed.targets:
        yield _decide(found, target)


def _decide(found: Findings, target: str) -> Decision:
    record = found.manifest.targets.get(target)
    if record is None:
        have = ", ".join(found.manifest.targets) or "none"
        detail = f"{target} is not in the bundle, which has {have}"
        return Decision("verified", False, "absent", "verified", detail)
    if record.status == "verified":
        detail = f"{target} is verified ({record.chosen})"
        return Decision("verified", True, "verified", "verified", detail)
    if found.waits(target) and found.excused(target):
        detail = f"{target} is {record.status}: no device of this kind has run it; allowed by name"
        return Decision("verified", True, record.status, "unverified allowed", detail)
    if record.status == "emulated" and not found.needed.production:
        detail = f"{target} is emulated: it gave the reference's answers on an emulator"
        return Decision("verified", True, "emulated", "emulated", detail)
    advice = ""
    if found.waits(target):
        named = target in found.needed.named_targets
        advice = ": run it there" + (", a policy names it" if named else ", or allow it by name")
    detail = f"{target} is {record.status}, verified is needed{advice}"
    return Decision("verified", False, record.status, "verified", detail)
