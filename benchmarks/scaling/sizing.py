"""How many servers a load needs. A server has cores of its own; clients have theirs elsewhere.

The load of many servers is simulated as one server with its share of the clients: what
least-request balancing makes of it. `whole` simulates all of them, to see how far that is off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.scaling.model import Load, Seen, Shape, least, simulate

LIMIT_S = 0.1
"""What 99 % of the requests have to be answered in: the chart's threshold on the queue alone."""
_OUTSTANDING = 64
_RESERVE = 0.9
_CAPACITY_S = 1.5
_CAPACITY_REQUESTS = 1000
_REQUESTS = 4_000
_LEAST_S = 30 * LIMIT_S  # an overload of a thirtieth is over the limit by then
_WAVE_PART = 10


@dataclass(frozen=True)
class Sized:
    """`share`: requests a second that one server answers in time."""

    clients: int
    rows: int
    think_s: float
    share: float

    @property
    def rate(self) -> float:
        return self.clients / self.think_s

    @property
    def servers(self) -> int | None:
        """None where no number of them is enough, since one request alone takes too long."""
        return math.ceil(self.rate / self.share) if self.share else None


def capacity(shape: Shape, rows: int) -> Seen:
    """One server with always something to do."""
    load = Load(_OUTSTANDING, rows)
    seen = simulate(shape, load, _CAPACITY_S, _CAPACITY_S / 10)
    few = len(seen.latencies) / _CAPACITY_REQUESTS
    return simulate(shape, load, _CAPACITY_S / few, _CAPACITY_S) if 0 < few < 1 else seen


def share(shape: Shape, rows: int, limit_s: float = LIMIT_S) -> float:
    """Nine tenths of the most requests a second that one server answers within the limit, 99 % of
    them, coming as those of many clients do. 0 where one alone takes longer.

    At the most itself the queue is about to grow without end: there, seeds decide.
    """
    fiftieth = capacity(shape, rows).rate / 50

    def too_many(count: int) -> bool:
        return opened(shape, rows, count * fiftieth).quantile(0.99) > limit_s

    return _RESERVE * (least(too_many, start=64) - 1) * fiftieth


def opened(shape: Shape, rows: int, rate: float) -> Seen:
    """All servers of the shape and the balancer, `rate` requests a second to each."""
    load = Load(rows=rows, rate=rate * shape.servers)
    return simulate(shape, load, max(_REQUESTS / rate, _LEAST_S))


def closed(shape: Shape, rows: int, rate: float, think_s: float) -> Seen:
    """The same load from clients that wait for their answers, on one server."""
    load = Load(round(rate * think_s), rows, think_s)
    return simulate(shape, load, _REQUESTS / rate, warm_s=think_s)


def wave(shape: Shape, jobs: int, rows: int, requests: int, within_s: float) -> tuple[int, float]:
    """Servers for `jobs` that start at once, each with so many requests one after another, and
    when the last job is done. A tenth of each job is simulated."""
    part = max(1, requests // _WAVE_PART)

    def done_s(servers: int) -> float:
        load = Load(math.ceil(jobs / servers), rows, requests=part)
        # Long enough for any: what is over is idle.
        return simulate(shape, load, 1e4 * within_s).done_s * requests / part

    guess = math.ceil(jobs * requests / within_s / capacity(shape, rows).rate) + 1
    servers = least(lambda count: done_s(count) <= within_s, start=guess)
    return servers, done_s(servers)
