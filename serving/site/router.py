"""Choose the place that runs a request, and the next place if it fails there.

A request is one call in the caller's thread from beginning to end. It is sent to one place, and to
the next one only after a failure. If its rows do not fit into one message, several messages are
sent, each to the best place at that moment. Answers are kept, so only the missing rows are sent to
another place. As the last step, the same thread writes the outputs from the complete answer (see
Progress). So a late answer of an abandoned server cannot overwrite them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from engines.base import Executable, Prepared
from engines.errors import RunError
from engines.processes import OwnProcess
from serving.errors import (
    AnswerError,
    BusyError,
    NowhereError,
    RefusedError,
    RemoteError,
    TooLargeError,
)
from serving.remote import Progress, RemoteModel
from serving.site.health import HealthCheck
from serving.site.options import SitePolicy
from serving.site.place import OPEN, Place, SiteReport, State
from soa.errors import SoaPipelineError
from soa.memory import Span, span_of
from soa.signature import Signature
from soa.text import logger

log = logger("soa_pipeline.site")

_UNMEASURED_S = 1e-3  # the assumed time of a request if no place has run one yet
_STRIKES = 3  # consecutive errors after which a place is bad; one error may be due to the event


class Router(Executable):
    """The executable of a site's session: it sends each request to the best place.

    Any number of threads may call it at once. `label`: the model's name in messages. `fall_back`:
    runs requests that no place answers; None: they fail.
    """

    def __init__(
        self, label: str, places: Sequence[Place], fall_back: Executable | None, policy: SitePolicy
    ) -> None:
        """Prepare a health check for each place; `start` begins them."""
        self.places = tuple(places)
        self.fall_back = fall_back
        self.policy = policy
        self.open: tuple[Place, ...] = ()
        """The places that take requests. The tuple is replaced, never changed, so reading it needs
        no lock."""
        self._checks = {
            place: HealthCheck(place, policy, partial(self.judge, place)) for place in self.places
        }
        self._label = label
        self.process = OwnProcess()
        self._changed = threading.Condition()
        """Its lock protects the places and `_closed`. Notified when a place may take requests."""
        self._closed = False
        self.counting = threading.Lock()
        self.fell_back = self._retried = self._nowhere = 0
        """Counters of the report; locked by `counting`."""

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.prepare([span_of(argument) for argument in arguments]).run()

    def prepare(self, arguments: Sequence[Span]) -> Call:
        return Call(self, arguments)

    def report(self) -> SiteReport:
        """Return the states of the places, and the numbers of requests up to now."""
        self.process.require()
        with self._changed, self.counting:
            places = tuple(place.report() for place in self.places)
            return SiteReport(places, self.fell_back, self._retried, self._nowhere)

    def close(self) -> None:
        """End the health checks, and close all places. Calls in progress end."""
        if not self.process.here():
            return  # in the child of a fork everything belongs to the parent
        with self._changed:
            self._closed = True
            self.open = ()
            self._changed.notify_all()
        for check in self._checks.values():
            check.stop()
        for executable in (*(place.executable for place in self.places), self.fall_back):
            if executable is not None:
                executable.close()  # this also ends the call that a health check waits for
        for check in self._checks.values():
            check.join()

    def start(self) -> None:
        """Check every place now, and begin the repeated checks.

        Without a fall-back it waits until a place is usable. Raises NowhereError if none is within
        the policy's deadline.
        """
        with ThreadPoolExecutor(max(1, len(self._checks))) as pool:
            list(pool.map(lambda check: check.check_now(), self._checks.values()))
        for check in self._checks.values():
            check.start()
        if self.fall_back is not None:
            return
        with self._changed:
            if self._changed.wait_for(lambda: self.open, self.policy.deadline_s):
                return
        raise NowhereError(self._no_answer_text({}, self.policy.deadline_s))

    # -- a request -------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        """Run a request at one place after the other, and at last in the fall-back.

        Raises NowhereError if no place answers and there is no fall-back.
        """
        begun = time.monotonic()
        latest_start = begun + self.policy.deadline_s - self.policy.attempt_s
        progress = Progress(call.arguments)
        tried: dict[Place, int] = {}
        failures: dict[str, str] = {}
        error: Exception | None = None
        while place := self._choose(tried, latest_start, first=not (progress.at or failures)):
            if error is not None:
                with self.counting:
                    self._retried += 1
            error = self._attempt(place, tried[place], progress)
            if error is not None:
                failures[place.name] = str(error)
            elif progress.done:
                progress.write()
                return
            else:
                del tried[place]  # the place may run the next rows too
        if self.fall_back is None:
            with self.counting:
                self._nowhere += 1
            seconds = time.monotonic() - begun
            raise NowhereError(self._no_answer_text(failures, seconds, progress.at))
        if failures:
            log.info("%s: runs here: %s", self._label, "; ".join(failures.values()))
        call.run_here()

    def _attempt(self, place: Place, generation: int, progress: Progress) -> Exception | None:
        """Send one message to a server, or run the whole request on a device of this host.

        `generation`: the generation of the place when it was taken. Returns the error, or None
        after an answer.
        """
        begun = time.perf_counter()
        error: Exception | None = None
        try:
            if isinstance(place.executable, RemoteModel):
                place.executable.ask(progress)
            else:
                place.executable(progress.arguments)
                progress.discard_answers()
        except (SoaPipelineError, RuntimeError) as raised:  # torch raises RuntimeErrors
            error = raised
        except BaseException:  # Ctrl-C: nothing is known of the place
            with self._changed:
                place.running -= 1
                self._changed.notify_all()
            raise
        with self._changed:
            place.running -= 1
            if error is None:
                self._note_success(place, time.perf_counter() - begun)
            else:
                self._note_failure(place, generation, error)
            self._changed.notify_all()
        return error

    def _choose(self, tried: dict[Place, int], latest_start: float, first: bool) -> Place | None:
        """Choose the best place for an attempt, which the caller must then make.

        The attempt is counted as running there. Returns None if no place takes the request;
        without a fall-back only after `latest_start`. `tried`: by place, the generation in which
        the request has tried it; the chosen place is added. `first`: this is the first attempt,
        which may begin even later. Raises RunError if the session is closed.
        """
        with self._changed:
            while True:
                if self._closed:
                    raise RunError(f"{self._label}: the session is closed")
                measured = [place.seconds for place in self.open if place.seconds]
                unmeasured = min(measured, default=_UNMEASURED_S)  # new places are tried early
                free = [place for place in self.open if place.admits(tried.get(place))]
                remaining_s = latest_start - time.monotonic()
                if free and (first or remaining_s > 0):
                    best = min(free, key=lambda place: place.delay(unmeasured))
                    best.running += 1
                    tried[best] = best.generation
                    return best
                if self.fall_back is not None or remaining_s <= 0:
                    return None
                self._changed.wait(remaining_s)

    def _no_answer_text(
        self, failures: Mapping[str, str], seconds: float, answered: int = 0
    ) -> str:
        """Return the message for a request that no place answered.

        `failures`: the errors of attempts, by name of the place. For other places the message has
        the state. `answered`: how many of the request's rows were answered.
        """
        with self._changed:
            states = {place.name: f"{place.state}, {place.reason}" for place in self.places}
        reasons = [f"{name}: {failures.get(name) or state}" for name, state in states.items()]
        if answered:
            reasons.append(f"its first {answered} rows were answered, and are not written")
        listed = "; ".join(reasons) or "the site names no place for it"
        return f"{self._label}: no answer anywhere within {seconds:.1f} s, no fall-back: {listed}"

    # -- the state of places; private functions need the lock ------------------------------------

    def _note_success(self, place: Place, seconds: float) -> None:
        """Note that a place has answered a message in `seconds`. A place on trial is good again."""
        place.add_time(seconds)
        place.finished += 1
        place.answered += 1
        place.answered_s += seconds
        place.strikes = 0
        if place.state == "trial":
            place.penalty_s = 0.0
            self._set_state(place, "good", "answers")

    def _note_failure(self, place: Place, generation: int, error: Exception) -> None:
        """Note that a place has failed, and change its state if necessary.

        It becomes busy if its queue is full. It becomes bad after an outage, or after several
        errors in a row that may also be due to the requests. `generation`: the generation of the
        place when the request was sent to it.
        """
        place.failed[type(error).__name__] += 1
        if isinstance(error, TooLargeError) or generation != place.generation:
            return  # the request is too large, or the place has recovered since it was chosen
        if place.state not in OPEN:
            return
        if isinstance(error, BusyError):
            self._set_state(place, "busy", str(error))
            return
        outage = isinstance(error, RemoteError) and not isinstance(
            error, AnswerError | RefusedError
        )
        if not outage:
            place.strikes += 1
            if place.strikes < _STRIKES and place.state == "good":
                return
        if not outage or place.state == "trial":
            place.punish(self.policy.health_s)
        place.strikes = 0
        self._set_state(place, "bad", str(error))
        self._checks[place].wake()

    def judge(self, place: Place, problem: str | None, queue_us: float | None) -> None:
        """Set the state of a place after a health check.

        `problem`: why it does not answer, or None. `queue_us`: the mean wait in its queue; None if
        it is not known.
        """
        with self._changed:
            if not place.finished:
                # No request has ended since the last check: the effect of a slow one decays.
                place.seconds *= 0.5
            place.finished = 0
            place.queue_us = queue_us
            if problem is not None:
                self._set_state(place, "bad", problem)
            elif self._waits_too_long(place):
                self._set_state(place, "busy", f"requests wait {queue_us:.0f} us in its queue")
            elif place.state == "bad":
                if time.monotonic() >= place.not_before:
                    self._set_state(place, "trial", "looks well again")
            elif place.state != "trial":
                self._set_state(place, "good", "ready")
            self._changed.notify_all()

    def _waits_too_long(self, place: Place) -> bool:
        """Whether requests wait too long in a place's queue.

        A busy place has half the limit, so that its state does not change at every check.
        """
        limit = self.policy.queue_us * (0.5 if place.state == "busy" else 1.0)
        return place.queue_us is not None and place.queue_us > limit

    def _set_state(self, place: Place, state: State, reason: str) -> None:
        """Change the state of a place, log that, and update `open`. The reason is kept, too."""
        place.reason = reason
        if place.state == state or self._closed:
            return
        if state in OPEN and place.state not in OPEN:
            place.generation += 1
        level = logging.INFO if state in OPEN else logging.WARNING
        log.log(
            level, "%s: %s is %s (was %s): %s", self._label, place.name, state, place.state, reason
        )
        place.state = state
        self.open = tuple(place for place in self.places if place.state in OPEN)


class Call(Prepared):
    """The request of a binding, prepared for a router. One thread at a time may run it.

    `arguments`: the arguments' memory as tensors.
    """

    def __init__(self, router: Router, arguments: Sequence[Span]) -> None:
        self._spans = list(arguments)
        self.arguments = [span.tensor() for span in arguments]
        self._router = router
        self._local: Prepared | None = None

    def run(self, stream: int = 0, /) -> None:
        """Run the request now. `stream` is ignored: the arguments are on the CPU."""
        router = self._router
        router.process.require()
        if router.open or self._local is None:
            router.run(self)
        else:  # there is no usable place: run directly, as a local session does
            self.run_here()

    def run_here(self) -> None:
        """Run on the local CPU, and count that. The router must have a fall-back."""
        if self._local is None:
            fall_back = self._router.fall_back
            assert fall_back is not None
            self._local = fall_back.prepare(self._spans)
        self._local.run()
        with self._router.counting:
            self._router.fell_back += 1

    def replace(self, changes: Mapping[int, Span]) -> None:
        if self._local is not None:
            self._local.replace(changes)
        for i, span in changes.items():
            self._spans[i], self.arguments[i] = span, span.tensor()


class OnDevice(Executable):
    """Runs an artifact on another device: copies the arguments there, runs, and copies back.

    The outputs are copied back after the whole run, so a failure does not change them.
    """

    def __init__(self, executable: Executable, device: torch.device, signature: Signature) -> None:
        self._executable = executable
        self._device = device
        roles = [argument.role for argument in signature.arguments]
        self._outputs = [i for i, role in enumerate(roles) if role == "output"]

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        """Run the artifact on arguments in CPU memory."""
        on_device = [argument.to(self._device) for argument in arguments]
        self._executable(on_device)
        results = [on_device[i].cpu() for i in self._outputs]  # waits for the device
        for i, values in zip(self._outputs, results, strict=True):
            arguments[i].copy_(values)

    def close(self) -> None:
        self._executable.close()
