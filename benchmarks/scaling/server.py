"""One simulated Triton server: threads that receive, a queue, instances that run, answers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from simpy import Environment, Event

from benchmarks.scaling.batcher import Batching
from benchmarks.scaling.costs import Costs
from benchmarks.scaling.disturbances import Disturbances
from benchmarks.scaling.processors import Processors

Steps = Generator[Event, Any, None]


@dataclass
class Counters:
    """The counters of Triton's /metrics: totals since the start."""

    requests: int = 0
    runs: int = 0
    rows: int = 0
    queue_s: float = 0.0


@dataclass(eq=False)
class _Waiting:
    rows: int
    since: float
    answered: Event


class Server:
    """`answer` takes a request from its arrival at the server to its answer's departure."""

    def __init__(
        self,
        env: Environment,
        costs: Costs,
        batching: Batching,
        cpu: Processors,
        rng: random.Random,
        instances: int = 1,
    ) -> None:
        self._env, self._costs, self._batching, self._cpu = env, costs, batching, cpu
        self._disturbances = Disturbances(costs, rng)
        self._queue: deque[_Waiting] = deque()
        self._arrival = env.event()
        self.counters = Counters()
        self.active = 0  # requests in the server; a balancer compares them
        for _ in range(instances):
            env.process(self._instance())

    def answer(self, rows: int) -> Steps:
        """The steps of a request. ValueError, if it has more rows than a run may have."""
        most = self._batching.max_rows
        if 0 < most < rows:
            raise ValueError(f"{rows} rows in a request, the server takes {most}")
        self.active += 1
        half = self._costs.of_request(rows) / 2
        yield self._work(half)
        mine = _Waiting(rows, self._env.now, self._env.event())
        self._queue.append(mine)
        if not self._arrival.triggered:
            self._arrival.succeed()
        yield mine.answered
        yield self._work(half)
        self.active -= 1
        self.counters.requests += 1

    def _instance(self) -> Steps:
        while True:
            while not (count := self._ready()):
                yield self._until_it_may_run()
            taken = [self._queue.popleft() for _ in range(count)]
            rows = sum(each.rows for each in taken)
            counters = self.counters
            counters.runs += 1
            counters.rows += rows
            counters.queue_s += sum(self._env.now - each.since for each in taken)
            # At each hand-over to the other process, other runnable work may get its turn.
            yield self._work(self._costs.inside / 2)
            yield self._work(self._costs.of_stub(count, rows))
            yield self._work(self._costs.inside / 2)
            self._env.process(self._reply(taken))

    def _reply(self, taken: list[_Waiting]) -> Steps:
        yield self._work(self._costs.reply)
        for each in taken:
            each.answered.succeed()
        yield self._env.timeout(0)  # the answers are sent first
        self._work(self._costs.behind)

    def _work(self, seconds: float) -> Event:
        return self._cpu.work(self._disturbances.disturbed(seconds))

    def _ready(self) -> int:
        if not self._queue:
            return 0
        oldest = self._env.now - self._queue[0].since
        return self._batching.take((each.rows for each in self._queue), oldest)

    def _until_it_may_run(self) -> Event:
        """The event of an arrival, or of the end of the oldest request's delay."""
        if self._arrival.triggered:
            self._arrival = self._env.event()
        if not self._queue:
            return self._arrival
        left = self._queue[0].since + self._batching.delay_s - self._env.now
        return self._arrival | self._env.timeout(max(left, 1e-9))
