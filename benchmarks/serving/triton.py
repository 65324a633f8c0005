"""Time requests to Triton servers on this machine: `python -m benchmarks.serving.triton [REF ...]`.

For each version, the calls of one client are timed at several sizes, and the same calls in this
process. Then 1, 8 and 32 clients send requests of one row; the server runs each request alone,
merges requests, or waits for more requests before it merges them. Clients are separate processes
(benchmarks/serving/clients.py). First they share the server's cores; then they get one core and the
server another, so nothing else runs on the server's core. The default versions are those of the
demo's model, ParticleNet and the Particle Transformer that are in production.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from benchmarks.serving.clients import Seen, connected, make_request
from benchmarks.table import print_machine
from pipeline.deployment.repository import Deployed, deploy
from pipeline.loading import load
from pipeline.report.tables import microseconds, new_table, show
from registry.bundle.bundle import Bundle
from registry.errors import NotFoundError
from registry.store.registry import Registry
from runtime.checked import recorded_tolerances
from runtime.checked.comparison import compare
from runtime.session.session import Session
from serving.client.options import RemoteOptions
from serving.errors import ServingError
from serving.local.triton import TritonServer
from serving.triton.config import Service
from serving.triton.repository import write_repository
from soa.errors import SoaPipelineError
from stages.reference.answers import Arrays, Reference
from stages.timing import bound_call

_REFS = ("jet-tagger@production", "particlenet@production", "zoo-particle-transformer@production")
_SECONDS = 3.0
_CALLS_S = 1.0
_SIZES = (1, 10, 100)
_CLIENTS = (1, 8, 32)
_WAIT_US = 1000

Place = Literal["shared", "apart"]
_PLACES: dict[Place, str] = {
    "shared": "clients and server on the same cores",
    "apart": "clients on one core, the server on another",
}


@dataclass(frozen=True)
class Load:
    """Results of all clients and of Triton: rows per execution, and µs of CPU time per request."""

    seen: Seen
    rows_a_run: float
    server_us: float

    @property
    def clients_us(self) -> float:
        return self.seen.cpu_s / len(self.seen.latencies_us) * 1e6


def main(*refs: str) -> int:
    print_machine()
    registry = Registry()
    try:
        for ref in refs or _in_production(registry):
            with tempfile.TemporaryDirectory(prefix="soa-bench-") as folder:
                _measure(registry, ref, Path(folder))
    except (SoaPipelineError, RuntimeError) as error:
        print(f"benchmarks.serving.triton: {error}", file=sys.stderr)
        return 1
    return 0


def _in_production(registry: Registry) -> Iterator[str]:
    for ref in _REFS:
        try:
            registry.find(ref)
        except NotFoundError as error:
            show([f"left out: {error}"])
        else:
            yield ref


def _measure(registry: Registry, ref: str, folder: Path) -> None:
    done = _deployed(registry, ref, folder / "deployed")
    show([""])
    show([f"{done.service.name}/{done.service.number}, {done.service.target}"])
    bundle = Bundle.open(done.folder / str(done.service.number) / "bundle")
    reference = Reference.load(bundle.file(bundle.manifest.reference))
    services = _services(done.service)
    # Triton's Python backend does not start if the path of the repository has a space.
    with _server(services["off"], folder / "latency", bundle) as server:
        _print_latency(bundle.path, server.url, reference.inputs)
    for place in _PLACES:
        loads: dict[tuple[str, int], Load] = {}
        for batching, service in services.items():
            repository = folder / f"{place}-{len(loads)}".replace(" ", "-")
            with _server(service, repository, bundle, place) as server:
                for n in _CLIENTS:
                    loads[batching, n] = _load(server, service, reference, bundle, n, place)
        _print_loads(loads, place)


def _deployed(registry: Registry, ref: str, out: Path) -> Deployed:
    """Deploy with merging if the model allows it, even if it is slower: this is measured here."""
    try:
        return deploy(registry, ref, out, requests="rows", merge=True)
    except ServingError:
        return deploy(registry, ref, out, requests="rows")


def _services(service: Service) -> dict[str, Service]:
    """The same version with requests that run alone, merged, and merged with a wait for more."""
    found = {"off": replace(service, batching=False)}
    if service.batching:
        found["on"] = service
        found[f"on, {_WAIT_US / 1000:g} ms"] = replace(service, queue_delay_us=_WAIT_US)
    return found


# On shared cores the scheduler decides which of them waits. Every server here runs in a session of
# its own, to which Linux gives half of the machine, however many clients there are (autogroups).
def two_cores() -> tuple[int, int]:
    """A core for clients and a core for a server. Raises RuntimeError if there is only one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("clients and server need a core each, and this process may use one only")
    return cores[0], cores[1]


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Threads and processes that this thread starts in the block stay on that core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _server(
    service: Service, repository: Path, bundle: Bundle, place: Place = "shared"
) -> Iterator[TritonServer]:
    def copied(into: Path) -> Bundle:
        shutil.copytree(bundle.path, into)
        return Bundle.open(into)

    write_repository(repository, service, copied)
    with contextlib.ExitStack() as stack:
        with on_core(two_cores()[1]) if place == "apart" else contextlib.nullcontext():
            server = stack.enter_context(TritonServer(repository))
        yield server


def _load(
    server: TritonServer,
    service: Service,
    reference: Reference,
    bundle: Bundle,
    clients: int,
    place: Place,
) -> Load:
    request = make_request(service, reference.inputs, 1)
    address = server.url.removeprefix("triton://")
    core = two_cores()[0] if place == "apart" else None
    with connected(address, request, clients, _SECONDS, core=core) as go:
        before, cpu = server.metrics(service.name), _cpu_s(server.pid)
        seen = go()
        after, cpu = server.metrics(service.name), _cpu_s(server.pid) - cpu
    for answer in seen.answers:
        _check(answer, service, reference, bundle)
    rows, runs = (
        after[f"nv_inference_{key}"] - before[f"nv_inference_{key}"]
        for key in ("count", "exec_count")
    )
    return Load(seen, rows / runs, cpu / len(seen.latencies_us) * 1e6)


def _check(answer: bytes, service: Service, reference: Reference, bundle: Bundle) -> None:
    """Raises ServingError unless the answer to one row agrees with the reference."""
    from tritonclient.grpc import service_pb2

    found = service_pb2.ModelInferResponse.FromString(answer)
    at = [sum(case.values()) for case in reference.cases].index(1)
    for t, raw in zip(service.wire.outputs, found.raw_output_contents, strict=True):
        values = torch.from_numpy(np.frombuffer(raw, t.dtype).reshape(t.shape(1)).copy())
        tolerance = recorded_tolerances(bundle.manifest)[t.name]
        wanted = reference.outputs[at][t.name].reshape(values.shape)
        if compare(values, wanted, tolerance, classifier=False).outside > tolerance.max_outside:
            raise ServingError(f"the server's {t.name} is not the reference's")


def _cpu_s(group: int) -> float:
    """CPU seconds so far of a process group: the server and its Python backends."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that has just ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _ways(bundle: Path, url: str) -> dict[str, Session]:
    """The sessions to compare call by call, by name."""
    return {
        "local": load(bundle),
        "remote": load(bundle, device=url, remote=RemoteOptions()),
        "remote, shared memory": load(bundle, device=url, remote=RemoteOptions(shared_memory=True)),
    }


def timed(call: Callable[[], None], seconds: float) -> list[float]:
    """The times of at least ten calls in µs, after one call that does not count."""
    call()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 10:
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) * 1e6)
    return times


def _quantiles(times: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(times, n=100)
    return cuts[49], cuts[98]


def _print_latency(bundle: Path, url: str, inputs: Arrays) -> None:
    ways = _ways(bundle, url)
    ((dim, rows),) = ways["local"].signature.ranges.items()
    sizes = [n for n in _SIZES if n <= rows.max]
    table = new_table("one client, one call: p50 / p99", "", *(f"n={n}" for n in sizes))
    medians: dict[str, list[float]] = {}
    for name, session in ways.items():
        cells = []
        for n in sizes:
            p50, p99 = _quantiles(timed(bound_call(session, inputs, {dim: n}), _CALLS_S))
            medians.setdefault(name, []).append(p50)
            cells.append(f"{microseconds(p50)} / {microseconds(p99)}")
        session.close()
        table.add_row(name, *cells)
    over = [a - b for a, b in zip(medians["remote"], medians["local"], strict=True)]
    table.add_row("remote over local", *map(microseconds, over))
    show([table])


def _print_loads(loads: dict[tuple[str, int], Load], place: Place) -> None:
    table = new_table(
        f"one row a request, {_PLACES[place]}", "clients", "batching", "requests/s", "of off",
        "p50", "p99", "rows a run", "CPU a request: clients", "its server",
    )  # fmt: skip
    for (batching, clients), found in sorted(loads.items(), key=lambda each: each[0][1]):
        p50, p99 = _quantiles(found.seen.latencies_us)
        table.add_row(
            str(clients), batching, f"{found.seen.rate:.0f}",
            f"{found.seen.rate / loads['off', clients].seen.rate:.2f}",
            microseconds(p50), microseconds(p99), f"{found.rows_a_run:.2f}",
            microseconds(found.clients_us), microseconds(found.server_us),
        )  # fmt: skip
    show([table])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
