"""The health checks of a site: a thread for each place checks its health and its queue.

A server is healthy if it and the model are ready, and it has the registry's bundle. The same check
finds the form of its requests. The wait in the queue is the mean wait of requests between two
checks, from Triton's own counters. Triton adds the time once for each request, so it is divided by
nv_inference_request_success, not by nv_inference_count, which counts rows
(https://github.com/triton-inference-server/server/blob/main/docs/user_guide/metrics.md).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from serving.errors import DeadlineError, ServingError
from serving.metrics_reader import read_page, sum_metrics
from serving.remote import RemoteModel
from serving.site.options import SitePolicy
from serving.site.place import Place

_FIRST_PAUSE_S = 0.1
_LONGEST = 4  # the longest pause while the place is bad, as a multiple of the interval of checks
_SPREAD = 0.2  # the random part of a pause, so that many clients do not check at once

_WAITED = "nv_inference_queue_duration_us"
_ANSWERED = "nv_inference_request_success"
_PENDING = "nv_inference_pending_request_count"


class _Reading(NamedTuple):
    """The model's metrics at a time on the monotonic clock."""

    at: float
    metrics: Mapping[str, float]

    def value(self, metric: str) -> float:
        """Return the value of a metric; 0 if the page does not have it."""
        return self.metrics.get(metric, 0.0)


class HealthCheck:
    """Checks the health of one place.

    `tell` is called after each check, with the problem or None, and with the wait of requests in
    the place's queue in µs, or None if that is not known.

    A device of this host has no server, so it is always healthy. After a failure it gets requests
    again when its penalty is over.
    """

    def __init__(
        self, place: Place, policy: SitePolicy, tell: Callable[[str | None, float | None], None]
    ) -> None:
        """Prepare the thread; `start` begins the checks."""
        executable = place.executable
        self._model = executable if isinstance(executable, RemoteModel) else None
        self._place, self._tell = place, tell
        self._every_s, self._within_s = policy.health_s, policy.attempt_s
        self._before: _Reading | None = None
        self._timeouts = 0
        """The number of consecutive checks without an answer in time."""
        self._random = random.Random()  # a new one: the program may have seeded the global one
        self._woken = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="soa-site", daemon=True)

    def start(self) -> None:
        """Check repeatedly in a new thread."""
        self._thread.start()

    def wake(self) -> None:
        """Let the thread check now, because the place has failed."""
        self._woken.set()

    def stop(self) -> None:
        """Let the thread end after the check in progress, without waiting for it."""
        self._ended = True
        self._woken.set()

    def join(self) -> None:
        """Wait until the thread has ended. If it was never started, return at once."""
        if self._thread.ident is not None:
            self._thread.join()

    def check_now(self) -> None:
        """Check once, in this thread, and tell the result."""
        problem = self._find_problem()
        self._tell(problem, None if problem else self._measure_queue_us())

    def _run(self) -> None:
        """Check the place repeatedly, until `stop`; the thread runs this.

        While the place is bad, the pauses grow. A failure that wakes the thread makes them short
        again.
        """
        pause = self._every_s if self._place.rest_s() is None else _FIRST_PAUSE_S
        longest = _LONGEST * self._every_s
        while True:
            self._woken.wait(pause * self._random.uniform(1 - _SPREAD, 1 + _SPREAD))
            if self._ended:
                return
            woken_by_failure = self._woken.is_set()
            self._woken.clear()
            self.check_now()
            rest_s = self._place.rest_s()
            if rest_s is None:
                pause = self._every_s
            else:
                next_pause = _FIRST_PAUSE_S if woken_by_failure else 2 * pause
                pause = max(min(next_pause, longest), rest_s)

    def _find_problem(self) -> str | None:
        """Ask whether the model can be used at this place; return why not, or None if it can."""
        if self._model is None:
            return None
        client = self._model.client
        try:
            if not self._model.is_ready(self._within_s):
                return f"server {client.address}: {self._model.opened.label} is not ready"
            self._model.update_form(self._within_s)
        except DeadlineError as error:
            self._timeouts += 1
            # After the second time, reconnect: the server may hang, but the connection may also be
            # dead without being closed.
            if self._timeouts > 1 and not self._ended:
                client.reconnect()
            return str(error)
        except ServingError as error:
            return str(error)
        self._timeouts = 0
        return None

    def _measure_queue_us(self) -> float | None:
        """Measure the mean wait of requests in the queue since the last check, in µs.

        None if the metrics do not give it.
        """
        before = self._before
        if before is None:  # the first check, or the metrics were missing: read them twice now
            before = self._read_metrics()
            if before is None:
                return None
            self._woken.wait(_FIRST_PAUSE_S)
        self._before = latest = self._read_metrics()
        if latest is None:
            return None
        waited_us = latest.value(_WAITED) - before.value(_WAITED)
        answered = latest.value(_ANSWERED) - before.value(_ANSWERED)
        if answered < 0 or waited_us < 0:  # a restarted server counts from 0
            return None
        if answered:
            return waited_us / answered
        # No request was answered. If some were pending at both checks, they waited all the time.
        stuck = latest.value(_PENDING) and before.value(_PENDING)
        return (latest.at - before.at) * 1e6 if stuck else 0.0

    def _read_metrics(self) -> _Reading | None:
        """Read the model's metrics on the server's page.

        None if the server has no such page, or if the page cannot be read.
        """
        page = self._place.metrics
        if page is None or self._model is None:
            return None
        try:
            text = read_page(page, self._within_s).decode("utf-8", "replace")
            return _Reading(time.monotonic(), sum_metrics(text, model=self._model.opened.name))
        except (OSError, ValueError):  # ValueError: the text is not in Prometheus' format
            return None
