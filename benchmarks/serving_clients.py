"""Clients of a server of Triton's protocol, in processes of their own: what each request took.

They send one request, made beforehand, again and again, each over a connection of its own with one
request on its way. They parse no answer while they are timed and run on an event loop, because
clients and server share this machine: `python -m benchmarks.serving` prints what they take of it.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:  # a client process imports gRPC and no torch
    import torch

    from serving.model_config import Service

_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_PROCESSES = 2
_CALL_S = 60.0


@dataclass(frozen=True)
class Seen:
    """What the clients saw together: each request in microseconds, and the first answer of each.

    `cpu_s` is what they themselves took of the CPU.
    """

    latencies_us: list[float]
    seconds: float
    cpu_s: float
    answers: list[bytes]

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.latencies_us) / self.seconds


def drive(address: str, request: bytes, clients: int, seconds: float) -> Seen:
    """Send `request`, a ModelInferRequest, to host:port from `clients` clients at once.

    Raises RuntimeError where a client fails: none is left out of the count.
    """
    shares = [count for i in range(_PROCESSES) if (count := len(range(i, clients, _PROCESSES)))]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving_clients"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for _ in shares
    ]  # fmt: skip
    try:
        for worker, count in zip(workers, shares, strict=True):
            _send(worker.stdin, (address, request, count, seconds))
        answers = [answer for worker in workers for answer in _receive(worker.stdout)]
        for worker in workers:
            _send(worker.stdin, "go")
        found = [_receive(worker.stdout) for worker in workers]
    except (EOFError, BrokenPipeError):
        raise RuntimeError(f"a client of {address} failed: see what it said above") from None
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    latencies = [us for times, _ in found for us in times]
    return Seen(latencies, seconds, sum(cpu for _, cpu in found), answers)


def _send(pipe: Any, what: Any) -> None:
    pickle.dump(what, pipe)
    pipe.flush()


def _receive(pipe: Any) -> Any:
    return pickle.load(pipe)


def make_request(
    service: Service, inputs: Mapping[str, Mapping[str, torch.Tensor]], n: int
) -> bytes:
    """A ModelInferRequest with the first n rows of the inputs, in the form that is served."""
    from tritonclient.grpc import service_pb2

    from serving.model_config import DIGEST
    from serving.wire import collection_parts
    from soa.collection import Collection
    from soa.transfer import fill_column

    request = service_pb2.ModelInferRequest(
        model_name=service.name, model_version=str(service.number)
    )
    request.parameters[DIGEST].string_param = service.digest
    for t in service.wire.inputs:
        collection = Collection(service.signature.layouts[t.collection], n)
        for column in collection.layout.columns:
            fill_column(collection, column, inputs[t.collection][column.name])
        values = t.gather(collection_parts(collection, t), 0, n)
        request.inputs.add(name=t.name, datatype=t.datatype, shape=values.shape)
        request.raw_input_contents.append(values.tobytes())
    for t in service.wire.outputs:
        request.outputs.add(name=t.name)
    made: bytes = request.SerializeToString()
    return made


async def _work(address: str, request: bytes, count: int, seconds: float) -> None:
    """In a process of its own: that many clients, from the word on its standard input."""
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each client
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(count)]
    calls = [channel.unary_unary(_METHOD) for channel in channels]
    answers = [await call(request, timeout=_CALL_S) for call in calls]
    _send(sys.stdout.buffer, answers)
    _receive(sys.stdin.buffer)
    cpu = time.process_time()
    until = time.perf_counter() + seconds
    sizes = map(len, answers)
    found = await asyncio.gather(
        *(_client(call, request, size, until) for call, size in zip(calls, sizes, strict=True))
    )
    cpu = time.process_time() - cpu
    _send(sys.stdout.buffer, ([us for times in found for us in times], cpu))
    for channel in channels:
        await channel.close()


async def _client(call: Any, request: bytes, size: int, until: float) -> list[float]:
    times: list[float] = []
    while (begun := time.perf_counter()) < until:
        answer = await call(request, timeout=_CALL_S)
        times.append((time.perf_counter() - begun) * 1e6)
        if len(answer) != size:
            raise RuntimeError(f"an answer of {len(answer)} bytes, the first had {size}")
    return times


if __name__ == "__main__":
    asyncio.run(_work(*_receive(sys.stdin.buffer)))
