"""speed: is it not slower than the version that holds the alias, timed side by side?"""

from __future__ import annotations

import math
from collections.abc import Iterable

from registry.promotion.decision import Decision
from registry.promotion.findings import Findings

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
        f"{worst.target} at n={worst.rows}: median {worst.new_us:.4g} us against "
        f"{worst.old_us:.4g} us of {speed.old}, ratio {worst.ratio:.3g}, limit {most:g}"
    )
    passed = worst.ratio <= most  # False for NaN
    yield Decision("speed", passed, f"ratio {worst.ratio:.3g}", limit, detail)
