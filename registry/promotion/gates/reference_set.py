"""reference set: do the artifacts agree with the portable program on a policy's reference file?"""

from __future__ import annotations

from collections.abc import Iterable

from registry.promotion.decision import Decision
from registry.promotion.findings import Findings
from registry.promotion.gates.tolerance import within

ORDER = 50


def decide(found: Findings) -> Iterable[Decision]:
    limit = f"outside <= {found.needed.max_outside:g}"
    for result in found.sets:
        where = f"{result.target}: {result.engine} beside the portable program on {result.name}"
        if result.worst:
            yield within("reference set", where, result.worst, found)
        else:
            detail = f"{where}: {result.why}, {limit} must be shown"
            yield Decision("reference set", False, "not shown", limit, detail)
