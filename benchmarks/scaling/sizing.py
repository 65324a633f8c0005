"""The number of servers that a load needs. Servers and clients have separate cores.

Many servers are simulated as one server with its share of the requests, as if the balancer divided
them evenly. `opened` can simulate all servers with the balancer; this shows the error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.scaling.model import Load, Seen, Shape, least, simulate

LIMIT_S = 0.1
"""The time within which 99 % of the requests must be answered. The chart has the same value as the
threshold of the time in the queue alone."""
_OUTSTANDING = 64
_RESERVE = 0.9
_CAPACITY_S = 1.5
_CAPACITY_REQUESTS = 1000
_REQUESTS = 4_000
_LEAST_S = 30 * LIMIT_S  # after it even an overload of 1/30 exceeds the limit
_WAVE_PART = 10


@dataclass(frozen=True)
class Sized:
    """A load and its size. `share`: the requests per second that one server answers in time."""

    clients: int
    rows: int
    think_s: float
    share: float

    @property
    def rate(self) -> float:
        return self.clients / self.think_s

    @property
    def servers(self) -> int | None:
        """None if no number of servers is enough, because a single request takes too long."""
        return math.ceil(self.rate / self.share) if self.share else None


def capacity(shape: Shape, rows: int) -> Seen:
    """Simulate one server that always has waiting requests."""
    load = Load(_OUTSTANDING, rows)
    seen = simulate(shape, load, _CAPACITY_S, _CAPACITY_S / 10)
    few = len(seen.latencies) / _CAPACITY_REQUESTS
    return simulate(shape, load, _CAPACITY_S / few, _CAPACITY_S) if 0 < few < 1 else seen


def share(shape: Shape, rows: int, limit_s: float = LIMIT_S) -> float:
    """Nine tenths of the largest rate at which a server answers 99 % of the requests in time.

    Requests arrive as from very many clients. 0 if a single request takes too long. At the largest
    rate itself the queue is about to grow without end, and the result depends on the seed.
    """
    fiftieth = capacity(shape, rows).rate / 50

    def too_many(count: int) -> bool:
        return opened(shape, rows, count * fiftieth).quantile(0.99) > limit_s

    return _RESERVE * (least(too_many, start=64) - 1) * fiftieth


def opened(shape: Shape, rows: int, rate: float) -> Seen:
    """Simulate all servers of the shape and the balancer, with `rate` requests/s for each."""
    load = Load(rows=rows, rate=rate * shape.servers)
    return simulate(shape, load, max(_REQUESTS / rate, _LEAST_S))


def closed(shape: Shape, rows: int, rate: float, think_s: float) -> Seen:
    """Simulate the same load on one server, from clients that wait for their answers."""
    load = Load(round(rate * think_s), rows, think_s)
    return simulate(shape, load, _REQUESTS / rate, warm_s=think_s)


def wave(shape: Shape, jobs: int, rows: int, requests: int, within_s: float) -> tuple[int, float]:
    """The servers that finish all jobs within `within_s`, and the time when the last job is done.

    The jobs start at once, and each sends `requests` requests one after another. A tenth of each
    job is simulated.
    """
    part = max(1, requests // _WAVE_PART)

    def done_s(servers: int) -> float:
        load = Load(math.ceil(jobs / servers), rows, requests=part)
        # Longer than any job; the servers are idle in the rest of this time.
        return simulate(shape, load, 1e4 * within_s).done_s * requests / part

    guess = math.ceil(jobs * requests / within_s / capacity(shape, rows).rate) + 1
    servers = least(lambda count: done_s(count) <= within_s, start=guess)
    return servers, done_s(servers)
