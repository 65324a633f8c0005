"""A place where a request may run, and what is known about it: a server, or a device here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from engines.base import Executable
from soa.signature import Signature

State = Literal["unknown", "good", "trial", "busy", "bad"]
"""`trial`: it was bad and looks well again; one request at a time goes there until one succeeds.
`busy`: its queue is too long."""

OPEN: tuple[State, ...] = ("good", "trial")

_MOST_PENALTY_S = 60.0
_NEW = 0.1  # the weight of the latest time in the running mean


@dataclass(eq=False)
class Place:
    """Everything that changes is guarded by the router's lock."""

    name: str
    executable: Executable
    preference: int = 0
    state: State = "unknown"
    reason: str = "not asked yet"
    generation: int = 0
    """How often it has been let in; a request tries it once for each."""
    running: int = 0
    seconds: float = 0.0
    """A running mean of one request's time; 0 before the first."""
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
        each = self.seconds or unmeasured
        waits = (self.running + 1) * each + (self.queue_us or 0.0) * 1e-6
        return (self.preference, waits, self.running)

    def took(self, seconds: float) -> None:
        self.seconds = (1 - _NEW) * self.seconds + _NEW * seconds if self.seconds else seconds
        self.finished += 1

    def punish(self, least_s: float) -> None:
        """Keep it out for a while, each time longer until a request succeeds there."""
        self.penalty_s = min(max(2 * self.penalty_s, least_s), _MOST_PENALTY_S)
        self.not_before = time.monotonic() + self.penalty_s


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

    @classmethod
    def of(cls, place: Place) -> PlaceReport:
        return cls(
            place.name,
            place.state,
            place.reason,
            place.running,
            place.answered,
            dict(place.failed),
            place.seconds * 1e6,
            place.queue_us,
        )


class OnDevice:
    """An artifact on another device than the arguments: copies there, runs, and copies back.

    The outputs come back once all has run, so a failure leaves them as they were.
    """

    def __init__(self, executable: Executable, device: torch.device, signature: Signature) -> None:
        self._executable = executable
        self._device = device
        self._written = [i for i, a in enumerate(signature.arguments) if a.role == "output"]

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        there = [argument.to(self._device) for argument in arguments]
        self._executable(there)
        back = [there[i].cpu() for i in self._written]
        for i, values in zip(self._written, back, strict=True):
            arguments[i].copy_(values)

    def close(self) -> None:
        close = getattr(self._executable, "close", None)
        if close:
            close()
