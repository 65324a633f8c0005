"""The cores of a machine, shared by the runnable threads as an operating system shares them.

A piece of work runs for a slice at most, then others get their turn; shorter work runs to its end.
The next piece of work is drawn at random: Linux chooses by the time that each thread had before,
and a server's threads do not take requests in the order of arrival. If work ran in this order, the
simulated p99 of merged requests was six tenths of the measured one.
"""

from __future__ import annotations

import math
import random
from typing import Any

from simpy import Environment, Event

SLICE_S = 1.4e-3
"""Linux's base slice on two cores: 0.7 ms times 1 + log2(cores), kernel/sched/fair.c."""


class Processors:
    """Simulated cores. Each piece of work is one thread."""

    def __init__(
        self,
        env: Environment,
        rng: random.Random,
        cores: float = math.inf,
        slice_s: float = SLICE_S,
    ) -> None:
        self._env, self._rng = env, rng
        self._cores = self._free = cores
        self._slice_s = slice_s
        self._runnable: list[tuple[float, Event]] = []
        self._left = -math.inf  # when the last work ended

    def work(self, seconds: float, wake: float = 0.0) -> Event:
        """An event when the work is done. Idle cores need `wake` seconds more for it."""
        if self._free == self._cores and self._env.now > self._left:
            seconds += wake
        if self._free == math.inf or seconds <= 0:
            return self._env.timeout(seconds)
        done = self._env.event()
        self._runnable.append((seconds, done))
        self._fill()
        return done

    def _fill(self) -> None:
        while self._free >= 1 and self._runnable:
            self._free -= 1
            left, done = self._drawn()
            step = min(left, self._slice_s)
            turn = self._env.timeout(step, (left - step, done))
            assert turn.callbacks is not None
            turn.callbacks.append(self._end)

    def _drawn(self) -> tuple[float, Event]:
        runnable = self._runnable
        at = self._rng.randrange(len(runnable))
        runnable[at], runnable[-1] = runnable[-1], runnable[at]
        return runnable.pop()

    def _end(self, turn: Any) -> None:
        self._free += 1
        self._left = self._env.now
        left, done = turn.value
        if left > 0:
            self._runnable.append((left, done))
        else:
            done.succeed()
        self._fill()
