"""Requests to a Triton server on this machine: `python -m benchmarks.serving.triton [REF ...]`.

For each version (by default jet-tagger@production), the calls of one client are timed at several
sizes, and the same calls in this process. Then 1, 8 and 32 clients send requests of one row
(benchmarks/serving/clients.py). The server runs each request alone, or merges them. It has one
core, and the clients another. `rows a run` is from Triton's own counters.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tritonclient.grpc import service_pb2

from benchmarks.table import print_machine
from pipeline.deployment.repository import Deployed, deploy
from pipeline.loading import load
from pipeline.report.tables import microseconds, new_table, show
from registry.store.registry import Registry
from runtime.session.session import Session
from serving.client.options import RemoteOptions
from serving.errors import ServingError
from serving.local.triton import TritonServer
from serving.remote.request_codec import Codec
from serving.triton import DIGEST
from soa.errors import SoaPipelineError
from soa.memory import argument_tensors
from stages.reference.answers import Arrays, Reference, filled_collections
from stages.timing import bind_call, race

_SECONDS = 3.0
_SIZES = (1, 10, 100)
_CLIENTS = (1, 8, 32)
_COUNTERS = ("nv_inference_count", "nv_inference_exec_count")


def main(refs: list[str]) -> None:
    print_machine()
    registry = Registry()
    for ref in refs or ["jet-tagger@production"]:
        with tempfile.TemporaryDirectory(prefix="soa-bench-") as folder:
            measure(registry, ref, Path(folder))


def measure(registry: Registry, ref: str, folder: Path) -> None:
    """Print the tables of a version: calls of one client, and requests of several."""
    table = new_table("one row a request", "clients", "batching", "requests/s", "p50", "p99",
                      "rows a run")  # fmt: skip
    for batching, merge in (("off", False), ("on", True)):
        repository = folder / batching
        try:
            deployed = deploy(registry, ref, repository, requests="rows", merge=merge)
        except ServingError as error:
            show([f"without merging: {error}"])
            continue
        file = folder / "request"
        file.write_bytes(one_row(deployed))
        with on_core(1):  # only the start: the server keeps its core
            server = TritonServer(repository).__enter__()
        try:
            if not merge:
                show_calls(registry, ref, deployed, server.url)
            for clients in _CLIENTS:
                table.add_row(str(clients), batching, *under_load(server, deployed, file, clients))
        finally:
            server.stop()
    show([table])


@contextlib.contextmanager
def on_core(number: int) -> Iterator[None]:
    """Threads and processes that this thread starts in the block stay on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def one_row(deployed: Deployed) -> bytes:
    """A ModelInferRequest with the first row of the reference."""
    service, signature = deployed.service, deployed.service.signature
    codec = Codec(signature, service.requests, service.merge)
    rows = dict.fromkeys(signature.dims, 1)
    inputs, outputs = filled_collections(signature, pool_of(deployed), rows, torch.device("cpu"))
    values = codec.encode(argument_tensors(signature, {**inputs, **outputs}, rows), 0, rows)
    request = service_pb2.ModelInferRequest(
        model_name=service.name, model_version=str(service.number)
    )
    request.parameters[DIGEST].string_param = service.digest
    for tensor in codec.wire.inputs:
        array = values[tensor.name]
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    for tensor in codec.wire.outputs:
        request.outputs.add(name=tensor.name)
    serialized: bytes = request.SerializeToString()
    return serialized


def pool_of(deployed: Deployed) -> Arrays:
    """The inputs of the version's reference."""
    bundle = deployed.bundle
    return Reference.load(bundle.file(bundle.manifest.reference)).inputs


def under_load(server: TritonServer, deployed: Deployed, file: Path, clients: int) -> list[str]:
    """Requests a second, the 50th and 99th percentile of their times, and the rows of a run.
    `file`: the request that all clients send."""
    address = server.url.removeprefix("triton://")
    words = ("benchmarks.serving.clients", address, str(file), str(clients), str(_SECONDS))
    before = server.metrics(deployed.service.name)
    with on_core(0):
        process = subprocess.run([sys.executable, "-m", *words], stdout=subprocess.PIPE, check=True)
    after = server.metrics(deployed.service.name)
    times: list[float] = json.loads(process.stdout)
    cuts = statistics.quantiles(times, n=100)  # 99 cuts: the first is the 1st percentile
    p50, p99 = microseconds(cuts[49]), microseconds(cuts[98])
    rows, runs = (after[key] - before[key] for key in _COUNTERS)
    return [f"{len(times) / _SECONDS:.0f}", p50, p99, f"{rows / runs:.2f}"]


def show_calls(registry: Registry, ref: str, deployed: Deployed, url: str) -> None:
    """Print the time of a call of one client, and in this process."""
    shared = RemoteOptions(shared_memory=True)
    sessions: dict[str, Session] = {
        "local": load(ref, registry=registry),
        "remote": load(ref, registry=registry, device=url),
        "remote, shared memory": load(ref, registry=registry, device=url, remote=shared),
    }
    inputs = pool_of(deployed)
    (dim,) = deployed.service.signature.dims
    table = new_table(f"{ref}: one client, one call", "", *(f"n={n}" for n in _SIZES))
    for name, session in sessions.items():
        calls = [bind_call(session, inputs, {dim: n}) for n in _SIZES]
        times = [race({"": call}, 1.0)[""].median_us for call in calls]
        table.add_row(name, *map(microseconds, times))
        session.close()
    show([table])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SoaPipelineError as error:
        sys.exit(f"benchmarks.serving.triton: {error}")
