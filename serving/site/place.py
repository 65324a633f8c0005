"""A place where a site's requests may run: its state, and the report about it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from engines.base import Executable
from runtime.devices import Workload
from serving.errors import ServingError

State = Literal["unknown", "good", "trial", "busy", "bad"]
"""`unknown`: not checked yet. `trial`: the place was bad and is healthy again; it gets one request
at a time until a request succeeds. `busy`: requests wait too long in its queue."""

OPEN: tuple[State, ...] = ("good", "trial")
"""The states in which a place takes requests."""
_LONGEST_PENALTY_S = 60.0


@dataclass(eq=False)
class Place(Workload):
    """A server or a device of this host, where a request may run. The router's lock protects it."""

    name: str
    executable: Executable
    preference: int = 0
    metrics: str | None = None
    """The URL of a server's own metrics."""
    state: State = "unknown"
    reason: str = "not asked yet"
    generation: int = 0
    """How often the place has become usable again. A request tries each generation only once."""
    queue_us: float | None = None
    """The mean wait of a request in its queue, from its metrics; None if they do not give it."""
    strikes: int = 0
    """The number of consecutive errors that may be due to the requests."""
    penalty_s: float = 0.0
    """How long the place last had to rest after a failure."""
    not_before: float = 0.0
    """The end of that rest, on the monotonic clock."""
    answered: int = 0
    answered_s: float = 0.0
    """The sum of the times of the `answered` requests. `seconds` is the router's estimate for the
    next one, which decays."""
    failed: Counter[str] = field(default_factory=Counter)
    """The number of failed requests by name of the error."""
    finished: int = 0
    """The number of requests since the last check of the place."""

    def admits(self, tried: int | None) -> bool:
        """Whether the place takes one more request now.

        `tried`: the generation in which this request has tried the place; None if it has not.
        """
        if tried == self.generation:
            return False
        return self.state == "good" or (self.state == "trial" and not self.running)

    def delay(self, unmeasured: float) -> tuple[int, float, int]:
        """Return the sort key of the place: the place with the smallest key is chosen.

        First its preference counts, then the expected seconds to an answer, then its load.
        `unmeasured`: the seconds to assume for a request if none was measured here.
        """
        expected_s = self.wait_s(self.running + 1, unmeasured) + (self.queue_us or 0.0) * 1e-6
        return (self.preference, expected_s, self.running)

    def punish(self, least_s: float) -> None:
        """Send no requests to the place for a while, at least for `least_s` seconds. This time
        doubles with each failure until a request succeeds there."""
        self.penalty_s = min(max(2 * self.penalty_s, least_s), _LONGEST_PENALTY_S)
        self.not_before = time.monotonic() + self.penalty_s

    def rest_s(self) -> float | None:
        """Return the seconds until a bad place may get requests again; None if it is not bad."""
        return self.not_before - time.monotonic() if self.state == "bad" else None

    def report(self) -> PlaceReport:
        """Copy the state and the numbers of the place. The caller holds the router's lock."""
        return PlaceReport(
            self.name, self.state, self.reason, running=self.running, answered=self.answered,
            failed=dict(self.failed),
            mean_us=self.answered_s / self.answered * 1e6 if self.answered else None,
            queue_us=self.queue_us,
        )  # fmt: skip


@dataclass(frozen=True)
class PlaceReport:
    """The state of one place, and its numbers of requests.

    `failed`: the number of failed requests by name of the error. `mean_us`: the mean time of all
    answered requests; None if there was none.
    """

    name: str
    state: State
    reason: str
    running: int
    answered: int
    failed: dict[str, int]
    mean_us: float | None
    queue_us: float | None


@dataclass(frozen=True)
class SiteReport:
    """The states of all places of a site, and the numbers of requests.

    `fell_back`: the number of requests that ran on the local CPU because no place answered.
    `retried`: the number of attempts after a failed one. `nowhere`: the number of requests without
    an answer. If a request is sent in several messages, `answered` of a place counts the messages.
    """

    places: tuple[PlaceReport, ...]
    fell_back: int
    retried: int
    nowhere: int

    @property
    def answered(self) -> int:
        """The number of answers, of the places and of the fall-back."""
        return self.fell_back + sum(place.answered for place in self.places)

    def place(self, name: str) -> PlaceReport:
        """Return the report of one place. Raises ServingError for an unknown name."""
        for place in self.places:
            if place.name == name:
                return place
        known = ", ".join(place.name for place in self.places)
        raise ServingError(f"the site has no place {name!r}: use one of {known}")
