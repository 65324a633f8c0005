"""A place where a site's requests may run: what is known of it, and what is reported."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from engines.base import Executable
from runtime.devices import Workload

State = Literal["unknown", "good", "trial", "busy", "bad"]
"""`trial`: it was bad and looks well again; one request at a time goes there until one succeeds.
`busy`: its queue is too long."""

OPEN: tuple[State, ...] = ("good", "trial")
_MOST_PENALTY_S = 60.0


@dataclass(eq=False)
class Place(Workload):
    """Where a request may run: a server, or a device here. The router locks it."""

    name: str
    executable: Executable
    preference: int = 0
    metrics: str | None = None
    """The address of a server's own metrics."""
    state: State = "unknown"
    reason: str = "not asked yet"
    generation: int = 0
    """How often it has been let in; a request tries it once for each."""
    queue_us: float | None = None
    """What its metrics say that a request waits there; None where they say nothing."""
    strikes: int = 0
    penalty_s: float = 0.0
    not_before: float = 0.0
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    """Requests since the last look at it."""

    def admits(self) -> bool:
        return self.state == "good" or (self.state == "trial" and not self.running)

    def delay(self, unmeasured: float) -> tuple[int, float, int]:
        """What chooses among places: the least comes first."""
        waits = self.wait_s(self.running + 1, unmeasured) + (self.queue_us or 0.0) * 1e-6
        return (self.preference, waits, self.running)

    def punish(self, least_s: float) -> None:
        """Keep it out for a while, each time longer until a request succeeds there."""
        self.penalty_s = min(max(2 * self.penalty_s, least_s), _MOST_PENALTY_S)
        self.not_before = time.monotonic() + self.penalty_s

    def rest_s(self) -> float | None:
        """Seconds until a bad place may be looked at again; None where it is not bad."""
        return self.not_before - time.monotonic() if self.state == "bad" else None

    def report(self) -> PlaceReport:
        return PlaceReport(
            self.name, self.state, self.reason, self.running, self.answered, dict(self.failed),
            self.seconds * 1e6, self.queue_us,
        )  # fmt: skip


@dataclass(frozen=True)
class PlaceReport:
    """`failed` counts requests by the name of the error; `mean_us` is of those answered."""

    name: str
    state: State
    reason: str
    running: int
    answered: int
    failed: dict[str, int]
    mean_us: float
    queue_us: float | None


@dataclass(frozen=True)
class SiteReport:
    """`fell_back`: requests run on the local CPU for want of a place; `retried`: attempts after
    a failed one; `nowhere`: requests that ended without an answer. A place's `answered` counts the
    messages where a request went in several."""

    places: tuple[PlaceReport, ...]
    fell_back: int
    retried: int
    nowhere: int

    @property
    def answered(self) -> int:
        return self.fell_back + sum(place.answered for place in self.places)

    def place(self, name: str) -> PlaceReport:
        return next(place for place in self.places if place.name == name)
