"""Choose the engine: the fastest over all sizes, and another one for fewer rows if that saves
enough time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.reports import Timing

_WORTH = 0.95  # another engine is taken if it needs less than this part of the overall one's time
_NOISE = 1.03  # engines within this factor of the best are equal; the first named one is taken


def fastest_overall(timings: Mapping[str, Mapping[str, Timing]], names: list[str]) -> str | None:
    """The engine with the smallest geometric mean over all sizes; None if none ran. Of engines that
    are equal within the noise, the first one is taken."""

    def mean(name: str) -> float:
        return math.fsum(math.log(_cost(rows[name])) for rows in timings.values()) / len(timings)

    best = min(map(mean, names), default=0.0)
    return next((name for name in names if mean(name) <= best + math.log(_NOISE)), None)


def choose_by_rows(
    sizes: Sequence[int], timings: Sequence[Mapping[str, Timing]], overall: str
) -> tuple[str, tuple[tuple[int, str], ...]]:
    """The engine for the largest size, and other engines for fewer rows: `(rows, engine)` for each.

    `overall` runs unless another engine saves enough: a second artifact costs memory and a load.
    If the engine changes between two sizes, it does so at their geometric mean.
    """
    best: list[tuple[int, str]] = []
    for n, times in sorted(zip(sizes, timings, strict=True), key=lambda pair: pair[0]):
        first = min(times, key=lambda name: _cost(times[name]))
        best.append((n, first if _saves(times[first], times[overall]) else overall))
    below = tuple(
        (max(math.ceil(math.sqrt(max(n, 1) * m)), n + 1), name)
        for (n, name), (m, following) in itertools.pairwise(best)
        if name != following
    )
    return best[-1][1], below


def _cost(timing: Timing) -> float:
    """The geometric mean of the median and the fastest turns: noise changes it least."""
    return math.sqrt(timing.median_us * timing.p05_us)


def _saves(timing: Timing, other: Timing) -> bool:
    """Whether `timing` is shorter than `other` by more than noise, in the median and in the fastest
    turns."""
    return timing.median_us < other.median_us * _WORTH and timing.p05_us < other.p05_us * _WORTH
