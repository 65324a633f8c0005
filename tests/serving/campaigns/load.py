"""Clients of a session that check every answer, and later that it has not changed."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.session.session import Session
from serving.errors import NowhereError
from serving.remote.remote_session import RemoteSession
from tests.models.tagged import Event

_KEPT = 200  # answers that a client keeps and checks once more later
_AHEAD = 12  # requests that an asynchronous client sends at once
_PAUSE_S = 0.005
_NUMBERS = itertools.count(1)


@dataclass
class Tally:
    """The results of all clients. `answered[number]` counts the outputs with an event's number."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever changes a field."""
    asked: set[int] = field(default_factory=set)
    answered: Counter[int] = field(default_factory=Counter)
    mixed: int = 0
    wrong: int = 0
    rounded: int = 0
    touched_later: int = 0
    touched_after_error: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        """Events that no output has the number of."""
        return len(self.asked - self.answered.keys())

    @property
    def twice(self) -> int:
        """Outputs with a number that another output has, too."""
        return sum(count - 1 for count in self.answered.values())

    @property
    def clean(self) -> bool:
        faults = (
            self.lost, self.twice, self.mixed, self.wrong, self.touched_later,
            self.touched_after_error,
        )  # fmt: skip
        return not any(faults) and not self.errors

    def lines(self) -> list[str]:
        return [
            f"events {len(self.asked)}, lost {self.lost}, done twice {self.twice}, "
            f"mixed {self.mixed}, wrong {self.wrong}",
            f"not the local bits but within tolerance {self.rounded}, changed later "
            f"{self.touched_later}, changed by a request that failed {self.touched_after_error}",
            f"unexpected errors {dict(self.errors) or 'none'}",
        ]


class Client(threading.Thread):
    """Sends events until it is told to stop.

    A `patient` client has no local session to fall back to, so it repeats a request until it is
    answered. For other clients every error counts.
    """

    def __init__(
        self, session: RemoteSession, local: Session, tally: Tally, seed: int, *,
        ahead: bool, patient: bool,
    ) -> None:  # fmt: skip
        super().__init__(name=f"client-{seed}", daemon=True)
        self._session, self._local, self._tally = session, local, tally
        self._random = random.Random(seed)
        self._ahead, self._patient = ahead, patient
        self._kept: deque[tuple[Event, Any]] = deque()
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                if self._ahead:
                    self._send_several()
                else:
                    self._send_one()
                time.sleep(_PAUSE_S)
        except BaseException as error:
            self._note(f"{type(error).__name__}: {error}")
            raise
        while self._kept:
            self._check_again()

    def _event(self) -> Event:
        event = Event.make(self._session, next(_NUMBERS), self._random.randint(1, 60))
        with self._tally.lock:
            self._tally.asked.add(event.number)
        return event

    def _send_one(self) -> None:
        event = self._event()
        while True:
            try:
                self._session.run(event.given, event.found)
                break
            except NowhereError as error:
                if not self._failed(event, error):
                    return
        self._check(event)

    def _send_several(self) -> None:
        events = [self._event() for _ in range(_AHEAD)]
        futures: list[Future[Any]] = [self._session.run_async(e.given, e.found) for e in events]
        for event, future in zip(events, futures, strict=True):
            try:
                future.result()
            except NowhereError as error:
                self._failed(event, error)
            else:
                self._check(event)

    def _failed(self, event: Event, error: NowhereError) -> bool:
        """Counts an error; returns whether to send the request again."""
        with self._tally.lock:
            self._tally.touched_after_error += not event.untouched
        if self._patient:
            return True
        self._note(str(error))
        return False

    def _check(self, event: Event) -> None:
        """Compares an answer with that of the local session, and keeps it."""
        numbers, scores = event.answers()
        local_event = Event.make(self._local, event.number, event.found.n)
        self._local.run(local_event.given, local_event.found)
        _, expected = local_event.answers()
        answered = set(numbers.tolist())
        with self._tally.lock:
            self._tally.answered.update(answered)
            self._tally.mixed += answered != {event.number}
            if not torch.allclose(scores, expected, rtol=1e-4, atol=1e-5):
                self._tally.wrong += 1
            else:
                self._tally.rounded += not torch.equal(scores, expected)
        self._kept.append((event, (numbers, scores)))
        if len(self._kept) > _KEPT:
            self._check_again()

    def _check_again(self) -> None:
        """Compares the oldest kept answer with what it was: nobody may write to it later."""
        event, (numbers, scores) = self._kept.popleft()
        numbers_now, scores_now = event.answers()
        same = torch.equal(numbers_now, numbers) and torch.equal(scores_now, scores)
        with self._tally.lock:
            self._tally.touched_later += not same

    def _note(self, text: str) -> None:
        with self._tally.lock:
            self._tally.errors[text[:200]] += 1
