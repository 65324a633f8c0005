"""The simulated system: clients, a proxy, servers behind it, and what the clients see.

A closed client has one request outstanding and sends the next one after `think_s` of work of its
own. The proxy passes requests in order and sends each to the less busy of two servers picked at
random, as Envoy's least-request balancing does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from simpy import Environment, Resource

from benchmarks.scaling.batcher import ALONE, Batching
from benchmarks.scaling.costs import Costs
from benchmarks.scaling.disturbances import Disturbances
from benchmarks.scaling.processors import Processors
from benchmarks.scaling.server import Counters, Server, Steps


@dataclass(frozen=True)
class Shape:
    """The system to build. `cores`: of each server. `client_cores`: of all clients together.

    `proxy_s`: the time of one of `proxy_threads` for a request and its answer; 0: no proxy.
    """

    costs: Costs
    batching: Batching = ALONE
    servers: int = 1
    instances: int = 1
    cores: float = 1
    client_cores: float = math.inf
    proxy_s: float = 0.0
    proxy_threads: int = 1


@dataclass(frozen=True)
class Load:
    """The load: `clients` closed clients, or requests at a fixed `rate`. A request has `rows` rows.

    `think_s`: the mean time between an answer and the next request, exponentially distributed; the
    simulated cores are not used in it. `requests`: the number that each client sends. `rate`:
    instead of clients, requests per second as from very many clients; they do not depend on the
    answers (Poisson).
    """

    clients: int = 0
    rows: int = 1
    think_s: float = 0.0
    requests: float = math.inf
    rate: float = 0.0


@dataclass
class Seen:
    """The results after the warm-up: `latencies` in seconds, in the order of the answers."""

    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    sent: int = 0
    answered: int = 0
    runs: int = 0
    done_s: float = 0.0  # when the last client was done

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def quantile(self, q: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else math.nan


class System:
    """The simulated system; it begins at time 0. `servers`: those that get requests."""

    def __init__(self, shape: Shape, seed: int = 1) -> None:
        self.env = Environment()
        self.shape = shape
        self.seen = Seen()
        self._rng = random.Random(seed)
        self._clients_cpu = Processors(self.env, self._rng, shape.client_cores)
        self._disturbances = Disturbances(shape.costs, self._rng)
        self._proxy = Resource(self.env, shape.proxy_threads)
        self.servers: list[Server] = []
        self.removed: list[Server] = []
        for _ in range(shape.servers):
            self.add_server()

    def add_server(self) -> None:
        shape = self.shape
        cpu = Processors(self.env, self._rng, shape.cores)
        self.servers.append(
            Server(self.env, shape.costs, shape.batching, cpu, self._rng, shape.instances)
        )

    def remove_server(self) -> None:
        """Remove the newest server: it gets no more requests, and answers those that it has."""
        self.removed.append(self.servers.pop())

    def counters(self) -> Counters:
        """The counters, summed over all present and removed servers."""
        total = Counters()
        for server in (*self.servers, *self.removed):
            for name, value in vars(server.counters).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    def run(self, load: Load, seconds: float, warm_s: float = 0.0) -> Seen:
        """Simulate until `seconds` after the warm-up, even if all clients are done earlier."""
        for _ in range(load.clients):
            self.env.process(self._client(load, warm_s))
        if load.rate:
            self.env.process(self._arrivals(load, warm_s))
        if warm_s > 0:
            self.env.run(warm_s)
        before = self.counters().runs
        self.env.run(warm_s + seconds)
        self.seen.seconds = seconds
        self.seen.runs = self.counters().runs - before
        return self.seen

    def _client(self, load: Load, warm_s: float) -> Steps:
        sent = 0
        while sent < load.requests:
            if load.think_s:
                yield self.env.timeout(self._rng.expovariate(1 / load.think_s))
            yield from self._sent(load.rows, warm_s)
            sent += 1
        self.seen.done_s = self.env.now

    def _arrivals(self, load: Load, warm_s: float) -> Steps:
        while True:
            yield self.env.timeout(self._rng.expovariate(load.rate))
            self.env.process(self._sent(load.rows, warm_s))

    def _sent(self, rows: int, warm_s: float) -> Steps:
        begun = self.env.now
        self.seen.sent += 1
        yield from self.request(rows)
        self.seen.answered += 1
        if begun >= warm_s:
            self.seen.latencies.append(self.env.now - begun)

    def request(self, rows: int) -> Steps:
        """The steps of a request, from the client's call to its return."""
        costs = self.shape.costs
        half = costs.of_client(rows) / 2
        yield self._clients_cpu.work(self._disturbances.disturbed(half))
        if costs.wait:
            yield self.env.timeout(costs.wait)
        if self.shape.proxy_s:
            yield from self._through_proxy()
        yield from self._choose().answer(rows)
        yield self._clients_cpu.work(self._disturbances.disturbed(half), costs.client_wake)

    def _through_proxy(self) -> Steps:
        with self._proxy.request() as turn:
            yield turn
            yield self.env.timeout(self.shape.proxy_s)

    def _choose(self) -> Server:
        if len(self.servers) == 1:
            return self.servers[0]
        one, other = self._rng.choice(self.servers), self._rng.choice(self.servers)
        return one if one.active <= other.active else other


def simulate(shape: Shape, load: Load, seconds: float, warm_s: float = 0.0, seed: int = 1) -> Seen:
    return System(shape, seed).run(load, seconds, warm_s)


def least(good: Callable[[int], bool], start: int = 1, most: int = 1 << 20) -> int:
    """The smallest good count, if all larger ones are good too. ValueError if it exceeds `most`."""
    low, high = 0, start
    while not good(high):
        low, high = high, high * 2
        if high > most:
            raise ValueError(f"no count up to {most} is enough")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high
