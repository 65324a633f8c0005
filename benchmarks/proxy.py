"""Compare two Triton servers behind an Envoy with one server: `python -m benchmarks.proxy`.

1, 8 and 32 clients of the demo model send one request at a time, each over a separate connection.
They are threads of up to 4 processes. Servers, proxy and clients share this machine, so two servers
can be faster only if there are cores left for them. Needs the demo in the registry (`make demo`)
and an Envoy.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.table import print_machine
from pipeline.deployment.repository import deploy
from pipeline.loading import load
from pipeline.report.tables import microseconds, new_table, show
from registry.store.registry import Registry
from runtime.session.session import Session
from serving.client.options import RemoteOptions
from serving.local.fleet import Fleet
from serving.local.triton import TritonServer
from soa.errors import SoaPipelineError
from stages.benchmark import bound_call
from stages.reference.answers import Reference

CLIENTS = (1, 8, 32)
_SECONDS = 3.0
_PREPARE_S = 5.0  # time to connect, once the processes run
_ROWS = 100
_PROCESSES = 4


@dataclass(frozen=True)
class Load:
    """The results of all clients; `shares`: the number of requests that each server answered."""

    rate: float
    p50_us: float
    p99_us: float
    shares: tuple[int, ...]


def main(ref: str) -> int:
    print_machine()
    try:
        _print(race(Registry(), ref))
    except SoaPipelineError as error:
        print(f"benchmarks.proxy: {error}", file=sys.stderr)
        return 1
    return 0


def race(
    registry: Registry, ref: str, clients: Sequence[int] = CLIENTS, seconds: float = _SECONDS
) -> dict[tuple[str, int], Load]:
    """The results, by set-up and number of clients."""
    found = {}
    with (
        tempfile.TemporaryDirectory(prefix="soa-bench-") as scratch,
        ProcessPoolExecutor(_PROCESSES, get_context("spawn")) as pool,
    ):
        folder = Path(scratch)
        done = deploy(registry, ref, folder)
        bundle = done.folder / str(done.service.number) / "bundle"
        ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "one": lambda: TritonServer(folder),
            "one behind the proxy": lambda: Fleet(folder, 1),
            "two behind the proxy": lambda: Fleet(folder, 2),
        }
        for way, start in ways.items():
            with start() as service:
                servers = service.servers if isinstance(service, Fleet) else (service,)
                for count in clients:
                    found[way, count] = _drive(
                        pool, service.url, servers, bundle, done.service.name, count, seconds
                    )
    return found


def _drive(
    pool: ProcessPoolExecutor,
    url: str,
    servers: Sequence[TritonServer],
    bundle: Path,
    model: str,
    count: int,
    seconds: float,
) -> Load:
    shares = [len(range(i, count, _PROCESSES)) for i in range(min(count, _PROCESSES))]
    # Wait until all processes have started: a new process first imports torch.
    for ready in [pool.submit(time.sleep, 0.2) for _ in range(_PROCESSES)]:
        ready.result()
    before = _answered(servers, model)
    begin = time.monotonic() + _PREPARE_S
    sent = [pool.submit(_clients, url, bundle, share, begin, seconds) for share in shares]
    every = [us for future in sent for us in future.result()]
    after = _answered(servers, model)
    cuts = statistics.quantiles(every, n=100)
    each = tuple(round(b - a) for a, b in zip(before, after, strict=True))
    return Load(len(every) / seconds, cuts[49], cuts[98], each)


def _answered(servers: Sequence[TritonServer], model: str) -> list[float]:
    return [each.metrics(model).get("nv_inference_request_success", 0.0) for each in servers]


def _clients(url: str, bundle: Path, count: int, begin: float, seconds: float) -> list[float]:
    """The times of all calls of `count` clients of this process, in µs.

    The calls begin at the time `begin` of the monotonic clock, which all processes share.
    """
    sessions = [load(bundle, device=url, remote=RemoteOptions()) for _ in range(count)]
    calls = [_call(session, bundle) for session in sessions]

    def work(call: Callable[[], None]) -> list[float]:
        call()
        if time.monotonic() > begin:
            raise RuntimeError("the clients were not ready in time")
        time.sleep(begin - time.monotonic())
        times: list[float] = []
        while (begun := time.monotonic()) < begin + seconds:
            call()
            times.append((time.monotonic() - begun) * 1e6)
        return times

    with ThreadPoolExecutor(count) as threads:
        times = list(threads.map(work, calls))
    for session in sessions:
        session.close()
    return [us for each in times for us in each]


def _call(session: Session, bundle: Path) -> Callable[[], None]:
    """A bound call on the first rows of the reference."""
    inputs = Reference.load(bundle / "reference.safetensors").inputs
    n = min(_ROWS, *(limit.max for limit in session.signature.ranges.values()))
    return bound_call(session, inputs, dict.fromkeys(session.signature.dims, n))


def _print(loads: dict[tuple[str, int], Load]) -> None:
    table = new_table(
        f"{_ROWS} rows a request", "servers", "clients", "requests/s", "p50", "p99", "each answered"
    )
    for (way, clients), found in loads.items():
        table.add_row(
            way, str(clients), f"{found.rate:.0f}", microseconds(found.p50_us),
            microseconds(found.p99_us), " / ".join(map(str, found.shares)),
        )  # fmt: skip
    show([table])


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["jet-tagger@production"])))
