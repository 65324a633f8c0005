"""Clients of a real server: each a process of its own, as a batch job is, one request at a time.

They come from a fork server that has imported everything, so that 32 of them are cheap.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pipeline.loading import load
from runtime.binding import Binding
from runtime.session import Session
from serving.remote_options import RemoteOptions
from soa.transfer import fill_column
from stages.reference import Reference

_READY_S = 60.0


@dataclass(frozen=True)
class Sent:
    """What one client did: the seconds of each round, and those on a CPU of its whole process."""

    times: list[float]
    cpu_s: float


class Clients:
    """`count` processes that are ready when entered; each sends `burst` requests, waits for all
    of them, and sends again."""

    def __init__(self, url: str, bundle: Path, count: int, rows: int, burst: int = 1) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._ready = context.Barrier(count + 1)
        self._sent: Any = context.Queue()
        self._processes = [
            context.Process(
                target=_client,
                args=(url, bundle, rows, burst, self._ready, self._sent),
                daemon=True,
            )
            for _ in range(count)
        ]

    def __enter__(self) -> Clients:
        for process in self._processes:
            process.start()
        self._ready.wait(_READY_S)
        return self

    def run(self, seconds: float) -> list[Sent]:
        """All at once, for that long. Only once."""
        until = time.monotonic() + seconds
        for _ in self._processes:
            self._sent.put(until)
        self._ready.wait(_READY_S)  # each has taken its task off the queue
        return [self._sent.get(timeout=seconds + _READY_S) for _ in self._processes]

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.join(1.0)
            process.kill()


def _client(url: str, bundle: Path, rows: int, burst: int, ready: Any, sent: Any) -> None:
    session = load(bundle, device=url, remote=RemoteOptions(in_flight=burst))
    calls = [_bound(session, bundle, rows) for _ in range(burst)]

    def round_trip() -> None:
        if burst == 1:
            calls[0]()
        else:
            session.run_many(calls)

    round_trip()
    ready.wait(_READY_S)
    until = sent.get()
    ready.wait(_READY_S)
    sent.put(_timed(round_trip, until))
    session.close()


def _timed(call: Callable[[], None], until: float) -> Sent:
    times: list[float] = []
    cpu = time.process_time()
    now = time.monotonic()
    while now < until:
        call()
        later = time.monotonic()
        times.append(later - now)
        now = later
    return Sent(times, time.process_time() - cpu)


def _bound(session: Session, bundle: Path, rows: int) -> Binding:
    """A bound call on the first rows of the reference."""
    inputs = Reference.load(bundle / "reference.safetensors").inputs
    given = {name: session.collection(name, rows) for name in session.signature.input_collections}
    for name, collection in given.items():
        for column in collection.layout.columns:
            fill_column(collection, column, inputs[name][column.name])
    written = {
        name: given.get(name) or session.collection(name, rows)
        for name in session.signature.output_collections
    }
    return session.bind(given, written)
