"""Scheduler: chooses where each event runs, for callers that do not want to choose.

It prefers the device where the data lies, then the session that will be done first. Each session
has a bounded queue, and a policy says what happens if the queue is full.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from engines.errors import RunError
from engines.processes import OwnProcess
from runtime.devices.staging import Staging
from runtime.errors import QueueFullError
from runtime.session import Collections, Session, check_memory, common_device, name_collections
from soa.memory import Device

WhenFull = Literal["wait", "spill", "raise"]


@dataclass(frozen=True)
class _Event:
    """A submitted call. `done`: the future that `submit` returned."""

    inputs: Collections
    outputs: Collections
    done: Future[None]
    ready: Any
    """On a GPU: the torch event after which the inputs may be read."""


@dataclass(eq=False, kw_only=True)
class Workload:
    """How busy a device or server is, to choose among several. The owner locks it.

    `running`: the number of runs in progress.
    """

    running: int = 0
    seconds: float = 0.0
    """The running mean of the seconds that a run takes; 0 before the first run."""

    def wait_s(self, ahead: int, unmeasured: float = 0.0) -> float:
        """Return the expected seconds until `ahead` runs have ended here.

        `unmeasured`: the seconds to assume for a run if none was measured yet.
        """
        return ahead * (self.seconds or unmeasured)

    def add_time(self, seconds: float) -> None:
        """Add the time of a run to the running mean, in which it has a weight of a tenth."""
        self.seconds = 0.9 * self.seconds + 0.1 * seconds if self.seconds else seconds


@dataclass(eq=False)
class _Lane(Workload):
    """One session of a scheduler, and the events that wait for it."""

    session: Session
    waiting: deque[_Event] = field(default_factory=deque)

    def delay(self) -> tuple[float, int]:
        """Return a sort key: how many seconds a new event would wait here, and behind how many."""
        ahead = len(self.waiting) + self.running
        return (self.wait_s(ahead), ahead)


class Scheduler:
    """Runs events on several sessions of one model, in its own threads.

    An event may run in the sessions on the device of its collections, or in all sessions if that
    device has none. It goes to the session that is expected to finish first. At most `queue` events
    wait for a session. If all these queues are full, `submit` waits ("wait"), uses another device
    and copies there and back ("spill"), or raises QueueFullError ("raise"). `workers` threads serve
    each session; on a GPU each thread has its own stream.

    The scheduler borrows the sessions. `close`, or the end of a `with` block, waits for all
    submitted events. It belongs to its process: in the child of a fork it raises RunError.

    Examples
    --------
    >>> from runtime import Scheduler
    >>> with Scheduler([session]) as scheduler:
    ...     future = scheduler.submit(jets, tags)
    >>> future.done()
    True
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        *,
        queue: int = 64,
        workers: int = 1,
        when_full: WhenFull = "wait",
    ) -> None:
        """Start `workers` threads for each session. Raises ValueError for impossible arguments."""
        if not sessions or queue < 1 or workers < 1:
            raise ValueError("at least one session, a queue of one and one worker are needed")
        if when_full not in ("wait", "spill", "raise"):
            raise ValueError(f"when_full={when_full!r}: use 'wait', 'spill' or 'raise'")
        self.signature = sessions[0].signature
        if any(session.signature != self.signature for session in sessions):
            raise ValueError("the sessions are of models with different signatures")
        self._queue = queue
        self._when_full = when_full
        self._lanes = [_Lane(session) for session in sessions]
        self._changed = threading.Condition()
        self._closed = False
        self._process = OwnProcess("scheduler")
        # Made here, so that an error of a GPU is the caller's.
        runners = [(lane, _Runner(lane.session)) for lane in self._lanes for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=runner, name="soa-scheduler", daemon=True)
            for runner in runners
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, inputs: Collections, outputs: Collections) -> Future[None]:
        """Queue one event. The returned future is done when the outputs are written.

        Do not change the collections before the future is done. On a GPU the event runs after the
        work that is now in the calling thread's current stream. Raises BindError at once if the
        memory does not fit, QueueFullError if a queue is full ("raise"), RunError after `close`.
        """
        self._process.require()
        any_start = all(lane.session.any_start for lane in self._lanes)
        check_memory(self.signature, *name_collections(self.signature, inputs, outputs), any_start)
        device = common_device(inputs, outputs)
        ready = None
        if device.type != "cpu":
            import torch

            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(device))
        event = _Event(inputs, outputs, Future(), ready)
        with self._changed:
            self._wait_for_lane(device).waiting.append(event)
            self._changed.notify_all()
        return event.done

    def _wait_for_lane(self, device: Device) -> _Lane:
        """Return the lane for an event whose data is on `device`; wait until one has room.

        The caller holds `_changed`. Raises RunError if the scheduler is closed meanwhile, and
        QueueFullError.
        """
        while True:
            if self._closed:
                raise RunError("the scheduler is closed")
            lane = self._choose_lane(device)
            if lane is not None:
                return lane
            self._changed.wait()

    @property
    def waiting(self) -> list[int]:
        """The number of events that wait for each session, in the order of the sessions."""
        self._process.require()
        with self._changed:
            return [len(lane.waiting) for lane in self._lanes]

    def close(self) -> None:
        """Run all submitted events, then end the threads."""
        if not self._process.here():
            return  # in the child of a fork the threads belong to the parent
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _choose_lane(self, device: Device) -> _Lane | None:
        """Return the lane for an event whose data is on `device`; None if no lane has room.

        Raises QueueFullError instead of returning None if `when_full` is "raise".
        """
        local = [lane for lane in self._lanes if lane.session.device == device]
        free = [lane for lane in local or self._lanes if len(lane.waiting) < self._queue]
        if not free and self._when_full == "raise":
            lanes = f"each session on {device}" if local else "each session"
            raise QueueFullError(
                f"{self._queue} events wait already for {lanes}: submit fewer at a time, or choose "
                "when_full='wait' or 'spill'"
            )
        if not free and self._when_full == "spill":
            free = [lane for lane in self._lanes if len(lane.waiting) < self._queue]
        return min(free, key=_Lane.delay, default=None)

    def _serve(self, lane: _Lane, run: Callable[[_Event], None]) -> None:
        """Run the events of a lane with `run`, until the scheduler is closed and none is left."""
        while (event := self._wait_for_event(lane)) is not None:
            start = time.perf_counter()
            has_run = _run_and_complete(event, run)
            seconds = time.perf_counter() - start
            del event  # an idle thread keeps no memory of a caller alive
            with self._changed:
                lane.running -= 1
                if has_run:
                    lane.add_time(seconds)
                self._changed.notify_all()

    def _wait_for_event(self, lane: _Lane) -> _Event | None:
        """Wait for the next event of a lane, and count it as running.

        Returns None if the scheduler is closed and the lane has no more events.
        """
        with self._changed:
            while not lane.waiting and not self._closed:
                self._changed.wait()
            if not lane.waiting:
                return None
            lane.running += 1
            self._changed.notify_all()
            return lane.waiting.popleft()


def _run_and_complete(event: _Event, run: Callable[[_Event], None]) -> bool:
    """Run an event, and give its future the result or the error.

    Returns whether it was run: an event whose future was cancelled is not.
    """
    if not event.done.set_running_or_notify_cancel():
        return False
    try:
        run(event)
    except BaseException as error:
        event.done.set_exception(error)
    else:
        event.done.set_result(None)
    return True


class _Runner:
    """Runs events for one thread, which needs its own staging memory and GPU stream."""

    def __init__(self, session: Session) -> None:
        """Make the staging memory, and on a GPU the stream."""
        self._session = session
        self._staging = Staging(session)
        self._stream: Any = None  # on a CPU
        if session.device.type != "cpu":
            import torch

            self._stream = torch.cuda.Stream(session.device)

    def __call__(self, event: _Event) -> None:
        """Run an event once its inputs are ready, and wait until it has ended."""
        if self._stream is None:
            if event.ready is not None:
                event.ready.synchronize()
            self._run(event)
            return
        import torch

        with torch.cuda.stream(self._stream):
            if event.ready is not None:
                self._stream.wait_event(event.ready)
            self._run(event)
            self._stream.synchronize()

    def _run(self, event: _Event) -> None:
        """Run an event in the caller's memory, or on copies if that is on another device."""
        if common_device(event.inputs, event.outputs) == self._session.device:
            self._session.run(event.inputs, event.outputs)
        else:
            self._staging.run(event.inputs, event.outputs)
