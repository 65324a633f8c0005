"""A thread for each place that looks whether it is well and how long its queue is.

Well: the server is ready, the model too, and it is the registry's bundle; how it takes requests is
learnt by the same look. The queue: what Triton's own counters say that a request has waited, over
the time between two looks. The time is counted once a request, so it is divided by
nv_inference_request_success, not by nv_inference_count, which counts rows (https://github.com/triton-inference-server/server/blob/main/docs/user_guide/metrics.md).
"""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.opening import Opened
from serving.errors import DeadlineError, ServingError
from serving.metrics import get, model_counters
from serving.remote import RemoteModel, find_served, number_of
from serving.site.places import Place
from serving.site.router import Router

_FIRST_PAUSE_S = 0.1
_LONGEST = 4  # times the time between two looks, while it is bad
_SPREAD = 0.2  # that many clients do not look at once

_WAITED = "nv_inference_queue_duration_us"
_ANSWERED = "nv_inference_request_success"
_PENDING = "nv_inference_pending_request_count"


class Watch:
    """Looks at one place; `look` is one look. A device of this host has no `model` on a server: it
    is well, and comes back when its penalty is over."""

    def __init__(
        self,
        router: Router,
        place: Place,
        opened: Opened,
        model: RemoteModel | None = None,
        metrics: str | None = None,
    ) -> None:
        self._router, self._place, self._model = router, place, model
        self._opened, self._metrics = opened, metrics
        self._every_s = router.policy.health_s
        self._within_s = router.policy.attempt_s
        self._before: _Counters | None = None
        self._silent = 0
        self._random = random.Random()  # its own: a program may have seeded the common one
        self._woken = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="soa-site", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        self._ended = True
        self._woken.set()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> None:
        problem = self._problem()
        self._router.judge(self._place, problem, None if problem else self._queue_us())

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S if self._place.state == "bad" else self._every_s
        while True:
            self._woken.wait(pause * self._random.uniform(1 - _SPREAD, 1 + _SPREAD))
            if self._ended:
                return
            woken = self._woken.is_set()
            self._woken.clear()
            self.look()
            if self._place.state == "bad":
                longest = _LONGEST * self._every_s
                pause = min(_FIRST_PAUSE_S if woken else 2 * pause, longest)
                pause = max(pause, self._place.not_before - time.monotonic())
            else:
                pause = self._every_s

    def _problem(self) -> str | None:
        if self._model is None:
            return None
        client, opened = self._model.client, self._opened
        try:
            if not client.ready(opened.name, number_of(opened), self._within_s):
                return f"server {client.address}: {opened.label} is not ready"
            self._model.follow(find_served(client, opened, self._within_s))
        except DeadlineError as error:
            self._silent += 1
            # Twice: it hangs, or the connection is dead and nobody has closed it.
            if self._silent > 1 and not self._ended:
                client.reconnect()
            return str(error)
        except ServingError as error:
            return str(error)
        self._silent = 0
        return None

    def _queue_us(self) -> float | None:
        """What requests have waited since the last look; None where the metrics do not say."""
        if self._metrics is None:
            return None
        before = self._before
        if before is None:  # the first look, or the metrics were away: two readings now
            before = self._counters(self._metrics)
            self._woken.wait(_FIRST_PAUSE_S)
        self._before = now = self._counters(self._metrics)
        if before is None or now is None:
            return None
        waited, answered = (
            now.found.get(name, 0.0) - before.found.get(name, 0.0) for name in (_WAITED, _ANSWERED)
        )
        if answered < 0 or waited < 0:  # a new server counts from 0
            return None
        if answered:
            return waited / answered
        # Nothing has come out; what is inside has waited since the last look at least.
        stuck = now.found.get(_PENDING, 0.0) and before.found.get(_PENDING, 0.0)
        return (now.at - before.at) * 1e6 if stuck else 0.0

    def _counters(self, url: str) -> _Counters | None:
        try:
            text = get(url, self._within_s).decode("utf-8", "replace")
            return _Counters(time.monotonic(), model_counters(text, self._opened.name))
        except (OSError, http.client.HTTPException, ValueError):  # ValueError: no numbers in it
            return None


@dataclass(frozen=True)
class _Counters:
    """A model's counters `at` a moment of the monotonic clock."""

    at: float
    found: Mapping[str, float]
