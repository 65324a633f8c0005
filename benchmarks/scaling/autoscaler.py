"""The autoscaler of the SuperSONIC chart: Prometheus, KEDA's query, and Kubernetes' HPA behind it.

The metric is the chart's own, "inference queue latency": the rate of Triton's queue durations over
the rate of its executions, in the last 15 s (templates/_scaling-metric.tpl of chart 0.3). The rules
are those of an HPA with an AverageValue target: it wants `ceil(metric / threshold)` servers, and
changes nothing if the metric is within a tenth of its target. It grows to the smallest number that
it wanted within a window, shrinks to the largest, and limits the number of servers for a period.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.scaling.model import System
from benchmarks.scaling.server import Steps

_TOLERANCE = 0.1


@dataclass(frozen=True)
class Scaling:
    """The rules; times are in seconds. The defaults are those of SuperSONIC's values.yaml.

    `start_s`: the time from the order of a server to its first request. It depends on the cluster;
    the default is a guess.
    """

    threshold_s: float = 0.1
    scrape_s: float = 5.0
    window_s: float = 15.0
    poll_s: float = 30.0
    up_window_s: float = 60.0
    up_period_s: float = 60.0
    down_window_s: float = 600.0
    down_period_s: float = 120.0
    step: int = 1
    start_s: float = 60.0
    least: int = 1
    most: int = 100


@dataclass(frozen=True)
class Decision:
    at: float
    metric_s: float
    wanted: int
    servers: int


class Autoscaler:
    """Adds and removes servers of a running system. `decisions`: one for each poll."""

    def __init__(self, system: System, scaling: Scaling) -> None:
        self._system, self._scaling = system, scaling
        self._samples: deque[tuple[float, float, int]] = deque()
        self._wishes: deque[tuple[float, int]] = deque()
        self._ordered = len(system.servers)
        self._grew = self._shrank = -math.inf
        self.decisions: list[Decision] = []
        system.env.process(self._every(scaling.scrape_s, self._scrape))
        system.env.process(self._every(scaling.poll_s, self._poll))

    def metric_s(self) -> float:
        """The mean queue duration of an execution, from the scrapes in the window."""
        since = self._system.env.now - self._scaling.window_s
        inside = [each for each in self._samples if each[0] >= since]
        if len(inside) < 2:
            return 0.0
        queued, runs = inside[-1][1] - inside[0][1], inside[-1][2] - inside[0][2]
        return queued / runs if runs else 0.0

    def _every(self, seconds: float, act: Callable[[], None]) -> Steps:
        while True:
            yield self._system.env.timeout(seconds)
            act()

    def _scrape(self) -> None:
        counters, now = self._system.counters(), self._system.env.now
        self._samples.append((now, counters.queue_s, counters.runs))
        while self._samples[0][0] < now - self._scaling.window_s - self._scaling.poll_s:
            self._samples.popleft()

    def _poll(self) -> None:
        now, rules = self._system.env.now, self._scaling
        metric = self.metric_s()
        wanted = self._wanted(metric)
        self._wishes.append((now, wanted))
        while self._wishes[0][0] < now - max(rules.up_window_s, rules.down_window_s):
            self._wishes.popleft()
        up = min(n for at, n in self._wishes if at >= now - rules.up_window_s)
        down = max(n for at, n in self._wishes if at >= now - rules.down_window_s)
        # Nothing grows or shrinks before the first window is over.
        full_up, full_down = now > rules.up_window_s, now > rules.down_window_s
        if full_up and up > self._ordered and now - self._grew >= rules.up_period_s:
            self._grow(min(up - self._ordered, rules.step))
        elif full_down and down < self._ordered and now - self._shrank >= rules.down_period_s:
            self._shrink(min(self._ordered - down, rules.step))
        self.decisions.append(Decision(now, metric, wanted, self._ordered))

    def _wanted(self, metric: float) -> int:
        rules = self._scaling
        ratio = metric / (rules.threshold_s * self._ordered)
        if abs(ratio - 1) <= _TOLERANCE:
            return self._ordered
        return min(max(math.ceil(metric / rules.threshold_s), rules.least), rules.most)

    def _grow(self, count: int) -> None:
        self._grew = self._system.env.now
        self._ordered += count
        for _ in range(count):
            self._system.env.process(self._start())

    def _shrink(self, count: int) -> None:
        self._shrank = self._system.env.now
        for _ in range(min(count, len(self._system.servers) - 1)):
            self._system.remove_server()
            self._ordered -= 1

    def _start(self) -> Steps:
        yield self._system.env.timeout(self._scaling.start_s)
        self._system.add_server()
