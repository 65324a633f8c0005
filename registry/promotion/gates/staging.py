"""staging: has the version been in `@staging` for as long as the policies require?"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from registry.promotion.decision import Decision
from registry.promotion.findings import Findings
from soa.text import number

ORDER = 70


def decide(found: Findings) -> Iterable[Decision]:
    needed, time = found.needed.min_time_in_staging, found.in_staging
    if not needed:
        return
    limit = f">= {_hours(needed)}"
    if time is None:
        detail = f"not in staging by a promotion, {_hours(needed)} there are needed"
        yield Decision("staging", False, "not in staging", limit, detail)
        return
    detail = f"in staging for {_hours(time)}, {_hours(needed)} are needed"
    yield Decision("staging", time >= needed, _hours(time), limit, detail)


def _hours(time: timedelta) -> str:
    return f"{number(time.total_seconds() / 3600)} h"
