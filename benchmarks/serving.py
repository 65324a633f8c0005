"""A real Triton with the demo model, seen by its clients: `python -m benchmarks.serving`.

Latency of one client at several sizes, beside the same call in this process; then 1, 8 and 32
clients with one jet a request, batching on and off. Clients are threads of up to 4 processes, which
share the machine's cores with the server. Needs the demo in the registry (`make demo`).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.table import print_machine
from pipeline.deploy import deploy
from pipeline.loading import load
from pipeline.report import console, microseconds, new_table
from registry.store import Registry
from runtime.session import Session
from serving.remote_options import RemoteOptions
from serving.repository import write_repository
from serving.server import TritonServer
from soa.errors import SoaPipelineError
from soa.transfer import fill_column
from stages.reference import Reference

_SECONDS = 4.0
_SIZES = (1, 10, 100, 1000)
_CLIENTS = (1, 8, 32)
_PROCESSES = 4
_PREPARE_S = 20.0  # to import torch, and to connect


@dataclass(frozen=True)
class Load:
    """What clients saw together: requests a second, microseconds, and rows in one execution."""

    rate: float
    p50_us: float
    p99_us: float
    rows_a_run: float


def main(ref: str) -> int:
    print_machine()
    registry = Registry()
    try:
        with tempfile.TemporaryDirectory(prefix="soa-bench-") as folder:
            _measure(registry, ref, Path(folder))
    except SoaPipelineError as error:
        print(f"benchmarks.serving: {error}", file=sys.stderr)
        return 1
    return 0


def _measure(registry: Registry, ref: str, folder: Path) -> None:
    done = deploy(registry, ref, folder / "merged")
    alone = replace(done.service, merge=False)
    bundle = done.folder / str(alone.number) / "bundle"
    write_repository(folder / "alone", alone, lambda into: _copy(registry, ref, into))
    local = load(bundle)
    with TritonServer(folder / "merged") as server:
        ways = {"local": local}
        for name, options in (
            ("remote", RemoteOptions()),
            ("remote, shared memory", RemoteOptions(shared_memory=True)),
        ):
            ways[name] = load(bundle, device=server.url, remote=options)
        _print_latency(ways, bundle)
        for session in ways.values():
            session.close()
    loads = {}
    name = done.service.name
    with ProcessPoolExecutor(_PROCESSES, get_context("spawn")) as pool:
        for batching, repository in (("on", "merged"), ("off", "alone")):
            with TritonServer(folder / repository) as server:
                for n in _CLIENTS:
                    loads[batching, n] = _clients(pool, server, bundle, name, n)
    _print_loads(loads)


def _copy(registry: Registry, ref: str, into: Path) -> Any:
    from pipeline.pull import pull

    return pull(registry, ref, into)[1]


def _call(session: Session, bundle: Path, n: int) -> Callable[[], None]:
    """A bound call on the first n rows of the reference."""
    inputs = Reference.load(bundle / "reference.safetensors").inputs
    given = {name: session.collection(name, n) for name in session.signature.input_collections}
    for name, collection in given.items():
        for column in collection.layout.columns:
            fill_column(collection, column, inputs[name][column.name])
    written = {
        name: given.get(name) or session.collection(name, n)
        for name in session.signature.output_collections
    }
    return session.bind(given, written)


def _timed(call: Callable[[], None], seconds: float) -> list[float]:
    """Microseconds of each call, after one that does not count."""
    call()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) * 1e6)
    return times


def _clients(
    pool: ProcessPoolExecutor, server: TritonServer, bundle: Path, name: str, count: int
) -> Load:
    """`count` clients, each with a connection and memory of its own, one row a request."""
    shares = [len(range(i, count, _PROCESSES)) for i in range(min(count, _PROCESSES))]
    before = server.metrics(name)
    begin = time.monotonic() + _PREPARE_S
    sent = [pool.submit(_share, server.url, bundle, share, begin) for share in shares]
    every = [us for future in sent for us in future.result()]
    after = server.metrics(name)
    rows, runs = (
        after[f"nv_inference_{key}"] - before[f"nv_inference_{key}"]
        for key in ("count", "exec_count")
    )
    return Load(len(every) / _SECONDS, *_quantiles(every), rows / runs)


def _share(url: str, bundle: Path, count: int, begin: float) -> list[float]:
    """In a process of its own: that many clients, from the moment `begin` of the common clock."""
    sessions = [load(bundle, device=url, remote=RemoteOptions()) for _ in range(count)]
    calls = [_call(session, bundle, 1) for session in sessions]

    def work(call: Callable[[], None]) -> list[float]:
        call()
        if time.monotonic() > begin:
            raise RuntimeError("the clients were not ready in time")
        time.sleep(begin - time.monotonic())
        return _timed(call, _SECONDS)

    with ThreadPoolExecutor(count) as threads:
        times = list(threads.map(work, calls))
    for session in sessions:
        session.close()
    return [us for each in times for us in each]


def _quantiles(times: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(times, n=100)
    return cuts[49], cuts[98]


def _print_latency(ways: dict[str, Session], bundle: Path) -> None:
    table = new_table("one client, one call: p50 / p99", "", *(f"n={n}" for n in _SIZES))
    for name, session in ways.items():
        cells = []
        for n in _SIZES:
            p50, p99 = _quantiles(_timed(_call(session, bundle, n), _SECONDS / 2))
            cells.append(f"{microseconds(p50)} / {microseconds(p99)}")
        table.add_row(name, *cells)
    console().print(table)


def _print_loads(loads: dict[tuple[str, int], Load]) -> None:
    table = new_table("one row a request", "batching", "clients", "requests/s", "p50", "p99",
                      "rows a run")  # fmt: skip
    for (batching, clients), found in loads.items():
        table.add_row(
            batching, str(clients), f"{found.rate:.0f}", microseconds(found.p50_us),
            microseconds(found.p99_us), f"{found.rows_a_run:.2f}",
        )  # fmt: skip
    console().print(table)


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["jet-tagger@production"])))
