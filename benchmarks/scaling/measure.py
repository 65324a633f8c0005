"""Measure a Triton on this machine: probes for the costs, and runs to check the predictions.

Clients are on one core and the server on another (benchmarks/placement.py says why).
"""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.placement import on_core, two_cores
from benchmarks.scaling.processes import children, cpu_s, machine_cpu_s
from benchmarks.scaling.records import Measured, Probe, Run
from benchmarks.serving_clients import Seen, connected, make_request
from pipeline.building.provenance import host, tools
from pipeline.deployment.repository import deploy
from pipeline.promotion.pulling import pull
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from serving.local.fleet import EnvoyProxy
from serving.local.triton import TritonServer
from serving.triton.config import Service
from serving.triton.repository import write_repository
from stages.reference.answers import Arrays, Reference

PROBES = ((1, 1), (10, 1), (50, 1), (200, 1), (1, 4), (1, 16))
"""The rows of a request, and the number of requests that the client sends at a time."""
CLIENTS = (1, 8, 32)
ROUNDS = 5
"""Rounds of all probes and runs. A machine's speed changes by a tenth from second to second."""
_PROXY_BURST = 16
_COMPUTE = ("input", "infer", "output")


@dataclass(frozen=True)
class _Counted:
    """Totals at one moment; times are in seconds."""

    at: float
    machine_s: float
    triton_s: float
    stub_s: float
    runs: float
    inside_s: float


@dataclass(frozen=True)
class _Served:
    """The clients' results, and the differences of the totals before and after."""

    seen: Seen
    took: _Counted

    @property
    def times(self) -> list[float]:
        return sorted(us / 1e6 for us in self.seen.latencies_us)

    @property
    def others(self) -> float:
        """The number of cores that other programs used meanwhile."""
        ours = self.took.triton_s + self.took.stub_s + self.seen.cpu_s
        return max(0.0, (self.took.machine_s - ours) / self.took.at)


@dataclass(frozen=True)
class _Site:
    """A running server, and the clients' core."""

    server: TritonServer
    service: Service
    inputs: Arrays
    core: int
    seconds: float

    def probe(self, rows: int, burst: int) -> Probe:
        served = self._serve(1, rows, burst)
        took, times = served.took, served.times
        return Probe(
            rows=rows, burst=burst, requests=served.seen.requests, runs=int(took.runs),
            client_s=served.seen.cpu_s, triton_s=took.triton_s, stub_s=took.stub_s,
            inside_s=took.inside_s,
            latencies=tuple(_quantile(times, (i + 0.5) / 100) for i in range(100)),
            others=served.others,
        )  # fmt: skip

    def run(self, clients: int) -> Run:
        served = self._serve(clients, 1, 1)
        times = served.times
        return Run(
            batching=self.service.batching, clients=clients, rate=served.seen.rate,
            p50_s=_quantile(times, 0.5), p99_s=_quantile(times, 0.99),
            requests_a_run=len(times) / max(1.0, served.took.runs), others=served.others,
        )  # fmt: skip

    def proxy_s(self, envoy: EnvoyProxy) -> float:
        """The CPU time of the proxy for a request and its answer.

        Several requests are sent at a time, otherwise most of the time would be for waking up. The
        result is for a proxy thread that is busy all the time.
        """
        with envoy, self._connected(envoy.url, 1, 1, _PROXY_BURST) as go:
            before = cpu_s(envoy.pid)
            seen = go()
            return (cpu_s(envoy.pid) - before) / seen.requests

    def _serve(self, clients: int, rows: int, burst: int) -> _Served:
        with self._connected(self.server.url, clients, rows, burst) as go:
            before = self._count()
            seen = go()
            after = self._count()
        took = {key: value - vars(before)[key] for key, value in vars(after).items()}
        return _Served(seen, _Counted(**took))

    def _connected(
        self, url: str, clients: int, rows: int, burst: int
    ) -> AbstractContextManager[Callable[[], Seen]]:
        request = make_request(self.service, self.inputs, rows)
        address = url.removeprefix("triton://")
        return connected(address, request, clients, self.seconds, burst=burst, core=self.core)

    def _count(self) -> _Counted:
        found: dict[str, Any] = self.server.metrics(self.service.name)
        return _Counted(
            at=time.monotonic(),
            machine_s=machine_cpu_s(),
            triton_s=cpu_s(self.server.pid),
            stub_s=sum(cpu_s(pid) for pid in children(self.server.pid)),
            runs=found["nv_inference_exec_count"],
            inside_s=sum(found[f"nv_inference_compute_{part}_duration_us"] for part in _COMPUTE)
            / 1e6,
        )


def measure(
    registry: Registry,
    ref: str,
    folder: Path,
    *,
    seconds: float = 1.0,
    probes: Sequence[tuple[int, int]] = PROBES,
    clients: Sequence[int] = CLIENTS,
    rounds: int = ROUNDS,
    envoy: Path | None = None,
    say: Callable[[str], None] = print,
) -> Measured:
    """Deploy `ref` into `folder`, with batching and without, serve it, and send requests.

    `envoy`: the cost of a request in this proxy is measured too. Raises ServingError, also for a
    model whose requests cannot be merged, and RuntimeError if there is only one core.
    """
    done = deploy(registry, ref, folder / "on", merge=True)
    service = done.service
    alone = replace(service, batching=False)
    write_repository(folder / "off", alone, lambda into: pull(registry, ref, into)[1])
    bundle = Bundle.open(done.folder / str(service.number) / "bundle")
    inputs = Reference.load(bundle.file(bundle.manifest.reference)).inputs
    found: list[Probe] = []
    runs: list[Run] = []
    proxy_s = None
    with (
        _site(folder / "on", service, inputs, seconds) as merging,
        _site(folder / "off", alone, inputs, seconds) as one_by_one,
    ):
        for i in range(rounds):
            say(f"round {i + 1} of {rounds}")
            found += [merging.probe(rows, burst) for rows, burst in probes]
            runs += [site.run(count) for count in clients for site in (merging, one_by_one)]
        if envoy is not None:
            say("one client through Envoy")
            behind = [(merging.server.options.host, merging.server.ports.grpc)]
            proxy_s = merging.proxy_s(EnvoyProxy(behind, binary=envoy))
    return Measured(
        model=f"{service.name}/{service.number}",
        when=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine={**host(), "torch": tools().get("torch", "?")},
        max_rows=service.max_batch_size,
        preferred=service.preferred,
        delay_us=service.queue_delay_us,
        probes=tuple(found),
        runs=tuple(runs),
        proxy_s=proxy_s,
    )


@contextlib.contextmanager
def _site(repository: Path, service: Service, inputs: Arrays, seconds: float) -> Iterator[_Site]:
    clients_core, server_core = two_cores()
    with contextlib.ExitStack() as stack:
        with on_core(server_core):
            server = stack.enter_context(TritonServer(repository))
        yield _Site(server, service, inputs, clients_core, seconds)


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, math.floor(q * len(ordered)))]
