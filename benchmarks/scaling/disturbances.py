"""Random differences in the time of the same work: timer ticks, other threads, caches.

Their rate is per second of work, so a long run has more of them than a short answer. Work that
waits for a run also waits for its disturbances.
"""

from __future__ import annotations

import random

from benchmarks.scaling.costs import Costs

_LEAST = 0.5  # of the work's cost: disturbed work takes at least this


class Disturbances:
    """`disturbed(seconds)`: the time that this work takes now; its mean is `seconds`."""

    def __init__(self, costs: Costs, rng: random.Random) -> None:
        self._extras, self._every, self._rng = costs.extras, costs.extras_every, rng
        self._until_next = self._later() if self._extras else 0.0
        self._owed = 0.0

    def disturbed(self, seconds: float) -> float:
        if not self._extras:
            return seconds
        self._until_next -= seconds
        while self._until_next < 0:
            self._owed += self._rng.choice(self._extras)
            self._until_next += self._later()
        takes = max(seconds + self._owed, _LEAST * seconds)
        self._owed -= takes - seconds
        return takes

    def _later(self) -> float:
        return self._rng.expovariate(1 / self._every)
