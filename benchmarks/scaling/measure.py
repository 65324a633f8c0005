"""A real Triton on this machine: probes that the costs come from, and runs that check them."""

from __future__ import annotations

import datetime
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.scaling.client import Clients, Sent
from benchmarks.scaling.processes import children, cpu_s, machine_cpu_s
from benchmarks.scaling.records import Measured, Probe, Run
from pipeline.deploy import deploy
from pipeline.provenance import host, tools
from pipeline.pull import pull
from registry.store import Registry
from serving.envoy import EnvoyProxy
from serving.repository import write_repository
from serving.server import TritonServer

PROBES = ((1, 1), (10, 1), (50, 1), (200, 1), (1, 4), (1, 16))
"""Rows of a request, and how many the one client sends at a time."""
CLIENTS = (1, 8, 32)
_PROXY_BURST = 16
_COMPUTE = ("input", "infer", "output")


@dataclass(frozen=True)
class _Counted:
    """Totals at one moment. Seconds."""

    at: float
    machine_s: float
    triton_s: float
    stub_s: float
    runs: float
    inside_s: float


@dataclass(frozen=True)
class _Served:
    """Clients' run, and what it took on the machine: differences of totals."""

    sent: list[Sent]
    took: _Counted

    @property
    def times(self) -> list[float]:
        return sorted(seconds for each in self.sent for seconds in each.times)

    @property
    def client_s(self) -> float:
        return sum(each.cpu_s for each in self.sent)

    @property
    def others(self) -> float:
        """Cores that something else used meanwhile."""
        ours = self.took.triton_s + self.took.stub_s + self.client_s
        return max(0.0, (self.took.machine_s - ours) / self.took.at)


def measure(
    registry: Registry,
    ref: str,
    folder: Path,
    *,
    seconds: float = 2.0,
    probes: Iterable[tuple[int, int]] = PROBES,
    clients: Sequence[int] = CLIENTS,
    envoy: Path | None = None,
    say: Callable[[str], None] = print,
) -> Measured:
    """Deploy `ref` into `folder`, with batching and without, serve it, and send requests.

    `envoy`: what a request costs that proxy is measured too. Raises ServingError, also for a model
    whose requests cannot be merged.
    """
    done = deploy(registry, ref, folder / "on", merge=True)
    service = done.service
    write_repository(
        folder / "off", replace(service, merge=False), lambda into: pull(registry, ref, into)[1]
    )
    bundle = done.folder / str(service.number) / "bundle"
    found: list[Probe] = []
    runs: list[Run] = []
    proxy_s = None
    for batching in (True, False):
        with TritonServer(folder / ("on" if batching else "off")) as server:
            if batching:
                for rows, burst in probes:
                    say(f"probe: {rows} rows, {burst} at a time")
                    found.append(_probe(server, service.name, bundle, rows, burst, seconds))
                if envoy is not None:
                    say("one client through Envoy")
                    behind = [(server.options.host, server.ports.grpc)]
                    proxy_s = _proxy_s(EnvoyProxy(behind, binary=envoy), bundle, seconds)
            for count in clients:
                say(f"batching {'on' if batching else 'off'}, {count} clients")
                runs.append(_run(server, service.name, bundle, batching, count, seconds))
    return Measured(
        model=f"{service.name}/{service.number}",
        when=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine={**host(), "torch": tools().get("torch", "?")},
        cores=len(os.sched_getaffinity(0)),
        max_rows=service.max_batch_size,
        preferred=service.preferred,
        delay_us=service.queue_delay_us,
        probes=tuple(found),
        runs=tuple(runs),
        proxy_s=proxy_s,
    )


def _probe(
    server: TritonServer, name: str, bundle: Path, rows: int, burst: int, seconds: float
) -> Probe:
    served = _serve(server, name, bundle, (1, rows, burst), seconds)
    took, times = served.took, served.times
    return Probe(
        rows=rows, burst=burst, requests=len(times) * burst, runs=int(took.runs),
        client_s=served.client_s, triton_s=took.triton_s, stub_s=took.stub_s,
        inside_s=took.inside_s,
        latencies=tuple(_quantile(times, (i + 0.5) / 100) for i in range(100)),
        others=served.others,
    )  # fmt: skip


def _proxy_s(envoy: EnvoyProxy, bundle: Path, seconds: float) -> float:
    """On a core, for a request and its answer. Several at a time, or waking up would be most of it:
    what is asked for is how many fill a thread."""
    with envoy, Clients(envoy.url, bundle, 1, 1, _PROXY_BURST) as ready:
        before = cpu_s(envoy.pid)
        (sent,) = ready.run(seconds)
        return (cpu_s(envoy.pid) - before) / len(sent.times) / _PROXY_BURST


def _run(
    server: TritonServer, name: str, bundle: Path, batching: bool, clients: int, seconds: float
) -> Run:
    served = _serve(server, name, bundle, (clients, 1, 1), seconds)
    times = served.times
    return Run(
        batching=batching, clients=clients, rate=len(times) / seconds,
        p50_s=_quantile(times, 0.5), p99_s=_quantile(times, 0.99),
        requests_a_run=len(times) / max(1.0, served.took.runs), others=served.others,
    )  # fmt: skip


def _serve(
    server: TritonServer, name: str, bundle: Path, load: tuple[int, int, int], seconds: float
) -> _Served:
    clients, rows, burst = load
    with Clients(server.url, bundle, clients, rows, burst) as ready:
        before = _count(server, name)
        sent = ready.run(seconds)
        after = _count(server, name)
    took = {key: value - vars(before)[key] for key, value in vars(after).items()}
    return _Served(sent, _Counted(**took))


def _count(server: TritonServer, name: str) -> _Counted:
    found: dict[str, Any] = server.metrics(name)
    return _Counted(
        at=time.monotonic(),
        machine_s=machine_cpu_s(),
        triton_s=cpu_s(server.pid),
        stub_s=sum(cpu_s(pid) for pid in children(server.pid)),
        runs=found["nv_inference_exec_count"],
        inside_s=sum(found[f"nv_inference_compute_{part}_duration_us"] for part in _COMPUTE) / 1e6,
    )


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, math.floor(q * len(ordered)))]
