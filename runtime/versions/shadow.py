"""A shadow: a second version that runs on some of production's events. Its results are discarded.

A fraction of the calls is sampled. When production has its answer, the calling thread copies the
inputs and the answer; another thread runs the shadow and compares. That thread needs the GIL and
may share a core with production, which then waits. So the thread rests after each event: copies and
work together take less than the sampled fraction of the time. There are only a few copies: if all
are in use, the event is dropped and counted.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from queue import SimpleQueue
from random import Random
from time import perf_counter, sleep
from typing import Any

import torch

from engines.processes import Lock, OwnProcess
from runtime.session import Binding, Collections, Rows, Session, WrappedBinding, takes_bindings
from runtime.versions.second import Results, SecondSession
from soa.memory import Collection, read_block
from soa.signature import Signature

_ROOM = 8  # the most events that are copied and not yet compared
_REST = 2.0  # a factor on each pause: above 1, because thread switches and cold caches cost time
_POLL_S = 0.1
_LONGEST_SLEEP_S = 0.05  # short, as `close` and `flush` end a pause
_draw = Random().random  # its own generator: the program may have seeded the common one


class ShadowedSession(SecondSession):
    """Production's session with a shadow. Any number of threads may use it.

    `fraction`: the share of events that the shadow gets, from 0 to 1.

    `close` ends the shadow and saves its record; `flush` saves it at any time.

    Examples
    --------
    >>> both = pipeline.load("jet-tagger@production", shadow="@staging", shadow_fraction=0.1)
    >>> both.run(jets, tags)
    >>> both.close()
    """

    def __init__(self, inner: Session, shadow: Session, fraction: float, results: Results) -> None:
        self._worker = _Worker(shadow, fraction, results)
        super().__init__(inner, results, self._worker.close)
        self.fraction = fraction
        self.offer = self._worker.offer

    def bind(
        self, inputs: Collections, outputs: Collections, *, graph: bool = False
    ) -> ShadowedBinding:
        """Bind as `Session.bind` does; the shadow gets copies and is not bound to this memory."""
        return ShadowedBinding(self, self.inner.bind(inputs, outputs, graph=graph))

    @takes_bindings
    def run_many(
        self, bindings: Sequence[Binding], threads: int = 1, *, stream: Any = None
    ) -> None:
        """Run as `Session.run_many` does. Afterwards the shadow gets its fraction of the events."""
        production = [b.inner if isinstance(b, ShadowedBinding) else b for b in bindings]
        self.inner.run_many(production, threads, stream=stream)
        for binding in bindings:
            if isinstance(binding, ShadowedBinding) and _draw() < self.fraction:
                self.offer(binding.inner)

    def flush(self) -> None:
        """Wait for the copied events, and add the results to the record.

        Raises the errors of the registry or the file; the results are then saved the next time.

        Examples
        --------
        >>> both = pipeline.load("jet-tagger@production", shadow="@staging", shadow_fraction=1)
        >>> both.run(jets, tags)
        >>> both.flush()
        >>> [record.events for record in registry.find("jet-tagger@staging").shadows.values()]
        [1]
        """
        self._worker.flush()


class ShadowedBinding(WrappedBinding):
    """A callable that runs production, `inner`, and offers the shadow some of its events."""

    def __init__(self, session: ShadowedSession, inner: Binding) -> None:
        super().__init__(inner)
        self._fraction = session.fraction
        self._offer = session.offer
        self._shadowed = session  # kept alive: when it is deleted, it ends its shadow

    def __call__(self, rows: Rows | None = None, *, stream: Any = None) -> None:
        self.inner(rows, stream=stream)
        if _draw() < self._fraction:
            self._offer(self.inner)


class _Copy:
    """A copy of one event: its inputs, production's answer, and memory for the shadow's answer.

    `capacity`: the most rows of an event, by dimension. `rows`: the event's rows. `seconds`: how
    long it took to copy the event. `binding`: runs the shadow on this memory.
    """

    def __init__(self, shadow: Session, capacity: Mapping[str, int]) -> None:
        """Allocate the memory, and bind the shadow to it."""
        self.signature = shadow.signature
        self.capacity = capacity
        self.rows: dict[str, int] = {}
        self.seconds = 0.0
        self._given = self._new_memory(self.signature.input_collections)
        self._expected = self._new_memory(self.signature.output_collections)
        only_written = [name for name in self._expected if name not in self._given]
        memory = {**self._given, **self._new_memory(only_written)}
        self._answer = {name: memory[name] for name in self._expected}
        self.binding = shadow.bind(self._given, self._answer)

    def _new_memory(self, names: Iterable[str]) -> dict[str, Collection]:
        """Make collections of these names, with the copy's capacity."""
        layouts, dims = self.signature.layouts, self.signature.rows_of
        return {name: Collection(layouts[name], self.capacity[dims[name]]) for name in names}

    def take(self, event: Binding) -> None:
        """Copy the inputs of an event and production's answer to it."""
        self.rows = dict(event.rows)
        rows_of = self.signature.rows_of
        for memory, theirs in ((self._given, event.inputs), (self._expected, event.outputs)):
            for name, collection in memory.items():
                collection.copy_from(theirs[name].rows(self.rows[rows_of[name]]))

    def measure_differences(self) -> dict[str, Any]:
        """Measure how far the shadow's answer is from production's."""
        return measure_differences(self.signature, self._answer, self._expected, self.rows)


def measure_differences(
    signature: Signature,
    ours: Mapping[str, Collection],
    theirs: Mapping[str, Collection],
    rows: Mapping[str, int],
) -> dict[str, Any]:
    """Measure how far the second version's answer (ours) is from production's (theirs).

    Returns the fields `max_abs` and `max_rel` of a `ShadowRecord`: the largest difference of each
    output. The relative difference is infinite where production's answer is zero.
    """
    max_abs: dict[str, float] = {}
    max_rel: dict[str, float] = {}
    for bound in signature.outputs:
        name = bound.block.collection
        n = rows[bound.rows]
        answer = read_block(bound, ours[name].rows(n))
        expected = read_block(bound, theirs[name].rows(n))
        differ = (answer != expected) & ~(answer.isnan() & expected.isnan())
        reference = expected.double()[differ]  # torch has no abs of bool and uint16
        gap = (answer.double()[differ] - reference).abs()
        if not answer.is_floating_point():
            gap = gap.clamp_min(1)  # large integers that differ may be one double
        max_abs[bound.name] = _largest(gap)
        max_rel[bound.name] = _largest(gap / reference.abs())
    return {"max_abs": max_abs, "max_rel": max_rel}


def _largest(values: torch.Tensor) -> float:
    """Return the largest value; 0 if there is none.

    It is infinite if a value is NaN, since then one of the answers is NaN or infinite.
    """
    worst = float(values.max()) if values.numel() else 0.0
    return math.inf if math.isnan(worst) else worst


class _Worker:
    """The thread that runs a shadow, and the events that wait for it.

    It belongs to the process that made it.
    """

    def __init__(self, shadow: Session, fraction: float, results: Results) -> None:
        """Start the thread. The copies are allocated when events need them."""
        self._shadow, self._fraction, self._results = shadow, fraction, results
        self._process, self._lock = OwnProcess(), Lock()
        self._closed, self._flushing = False, 0
        self._free: deque[_Copy | None] = deque([None] * _ROOM)
        self._work: SimpleQueue[_Copy | threading.Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="soa-shadow", daemon=True)
        self._thread.start()

    def offer(self, event: Binding) -> None:
        """Copy an event whose call has ended, for the shadow. Without room, it is dropped."""
        if self._closed or not event.writes or not self._process.here():
            return
        start = perf_counter()
        with self._lock:
            if not self._free:
                self._results.dropped.add()
                return
            copy = self._free.pop()
        try:
            if copy is None or any(n > copy.capacity[dim] for dim, n in event.rows.items()):
                copy = None  # freed before the new one is allocated
                copy = _Copy(self._shadow, self._capacity_for(event.rows))
            copy.take(event)
            copy.seconds = perf_counter() - start
        except Exception as error:
            self._free.append(copy)
            self._results.add_failure(error)
        else:
            self._work.put(copy)

    def _capacity_for(self, rows: Mapping[str, int]) -> dict[str, int]:
        """Choose the capacity of a new copy for an event with these rows, by dimension.

        It is the next power of two, so that events that grow need few new copies.
        """
        ranges = self._shadow.signature.ranges
        powers_of_two = {dim: 1 << max(n - 1, 0).bit_length() for dim, n in rows.items()}
        return {dim: min(n, ranges[dim].limit) for dim, n in powers_of_two.items()}

    def flush(self) -> None:
        """Wait until all events so far are compared, and save the results."""
        self._process.require()
        done = threading.Event()
        with self._lock:
            self._flushing += 1
        self._work.put(done)
        while self._thread.is_alive() and not done.wait(_POLL_S):  # another thread may call close
            pass
        with self._lock:
            self._flushing -= 1
        self._results.save()

    def close(self) -> None:
        """End the thread, which saves the last results. The garbage collector may call this."""
        if self._process.here():
            self._closed = True
            self._work.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        """Run the shadow on events and compare, until `close`; the thread runs this.

        Pauses keep the shadow within its share of the time.
        """
        while (work := self._work.get()) is not None:
            if isinstance(work, threading.Event):  # of a `flush` that waits for it
                work.set()
                continue
            start = perf_counter() - work.seconds  # the copy counts as work, too
            try:
                work.binding(work.rows)
                self._results.add(events=1, **work.measure_differences())
            except Exception as error:
                self._results.add_failure(error)
            self._free.append(work)
            now = perf_counter()
            rested = now + _REST * (now - start) / self._fraction
            while not (self._closed or self._flushing) and (left := rested - perf_counter()) > 0:
                sleep(min(left, _LONGEST_SLEEP_S))
        self._results.end()
        self._shadow.close()
