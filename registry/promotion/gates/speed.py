"""speed: is the version as fast as the one that holds the alias, within the limit?"""

from __future__ import annotations

import math
from collections.abc import Iterable

from registry.promotion.decision import Decision
from registry.promotion.findings import Findings
from soa.text import microseconds, number

ORDER = 60


def decide(found: Findings) -> Iterable[Decision]:
    speed, most = found.speed, found.needed.max_slowdown
    limit = f"ratio <= {most:g}"
    if speed is None:
        detail = f"no version in place to compare with, limit {most:g} times its time"
        yield Decision("speed", True, "no version in place", limit, detail)
        return
    if not speed.points:
        detail = f"not measured beside {speed.old}, limit {most:g} times its time"
        yield Decision("speed", False, "not measured", limit, detail)
        return
    worst = max(speed.points, key=lambda point: (math.isnan(point.ratio), point.ratio))
    detail = (
        f"{worst.target} at n={worst.rows}: median {microseconds(worst.new_us)} against "
        f"{microseconds(worst.old_us)} of {speed.old}, ratio {number(worst.ratio)}, limit {most:g}"
    )
    passed = worst.ratio <= most  # False for NaN
    yield Decision("speed", passed, f"ratio {number(worst.ratio)}", limit, detail)
