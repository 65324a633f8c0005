"""The cores of a machine, shared by whatever is runnable, as an operating system does it.

Round robin: a piece of work runs for a slice at most, then others have their turn. Work that is
shorter runs to its end: that is how Linux treats the fractions of a millisecond that a request
takes. Sharing evenly among all at once would be another queue: it wakes clients in step.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from simpy import Environment, Event

SLICE_S = 1.4e-3
"""Linux's base slice on two cores: 0.7 ms times 1 + log2(cores), kernel/sched/fair.c."""


class Processors:
    """A piece of work is one thread."""

    def __init__(self, env: Environment, cores: float = math.inf, slice_s: float = SLICE_S) -> None:
        self._env = env
        self._cores = self._free = cores
        self._slice_s = slice_s
        self._runnable: deque[tuple[float, Event]] = deque()
        self._left = -math.inf  # when work was last done

    def work(self, seconds: float, wake: float = 0.0) -> Event:
        """Happens when that much work is done, and `wake` more if nothing was being done."""
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
            left, done = self._runnable.popleft()
            step = min(left, self._slice_s)
            turn = self._env.timeout(step, (left - step, done))
            assert turn.callbacks is not None
            turn.callbacks.append(self._end)

    def _end(self, turn: Any) -> None:
        self._free += 1
        self._left = self._env.now
        left, done = turn.value
        if left > 0:
            self._runnable.append((left, done))
        else:
            done.succeed()
        self._fill()
