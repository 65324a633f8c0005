"""Which engine is chosen: the fastest over all sizes, and another below some row count where that
is worth it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.benchmark import Timing

_WORTH = 0.9  # of the time of the candidate that is best overall: a tenth of it saved


def fastest_overall(timings: Mapping[str, Mapping[str, Timing]], names: list[str]) -> str | None:
    """The engine with the smallest geometric mean of medians over all sizes; None if none ran."""

    def mean(name: str) -> float:
        return math.fsum(math.log(rows[name].median_us) for rows in timings.values())

    return min(names, key=mean) if names else None


def choose_by_rows(
    sizes: Sequence[int], medians: Sequence[Mapping[str, float]], overall: str
) -> tuple[str, tuple[tuple[int, str], ...]]:
    """The engine for the largest size, and other engines for fewer rows: `(rows, engine)` for each.

    `overall` runs wherever no other is worth it: a second artifact costs memory and a second load.
    Between two sizes the change lies at their geometric mean.
    """
    best: list[tuple[int, str]] = []
    for n, times in sorted(zip(sizes, medians, strict=True), key=lambda pair: pair[0]):
        first = min(times, key=lambda name: times[name])
        best.append((n, first if times[first] < times[overall] * _WORTH else overall))
    below = tuple(
        (max(math.ceil(math.sqrt(max(n, 1) * m)), n + 1), name)
        for (n, name), (m, following) in itertools.pairwise(best)
        if name != following
    )
    return best[-1][1], below
