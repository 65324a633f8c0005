"""Clients of a Triton server that run in separate processes and time each request.

Each client sends the same prepared request again and again, over its own connection, one at a time.
Clients and server share this machine. To use little CPU time, clients run on an event loop and do
not parse answers while they are timed; `python -m benchmarks.serving.triton` prints their CPU time.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:  # a client process imports gRPC and no torch
    import torch

    from serving.triton.config import Service

_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_PROCESSES = 2
_CALL_S = 60.0


@dataclass(frozen=True)
class Seen:
    """The results of all clients: the times of all requests, and the first answer of each
    connection. `cpu_s`: the CPU time of the clients."""

    latencies_us: list[float]
    seconds: float
    cpu_s: float
    answers: list[bytes]

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.latencies_us) / self.seconds


@contextmanager
def connected(
    address: str,
    request: bytes,
    clients: int,
    seconds: float,
    *,
    core: int | None = None,
) -> Iterator[Callable[[], Seen]]:
    """Start clients of `address` (host:port), each of which has already had an answer.

    `request`: a serialized ModelInferRequest. Yields a function to be called once: it lets all
    clients send the request for `seconds`, and returns the results. `core`: one process on this
    core runs all clients; None: two processes on any core. Raises RuntimeError if a client fails,
    so no client is missing from the results.
    """
    count = _PROCESSES if core is None else 1
    shares = [share for i in range(count) if (share := len(range(i, clients, count)))]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving.clients"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for _ in shares
    ]  # fmt: skip
    try:
        for worker, share in zip(workers, shares, strict=True):
            _send(worker.stdin, (address, request, share, seconds, core))
        answers = [answer for worker in workers for answer in _receive(worker.stdout)]

        def go() -> Seen:
            for worker in workers:
                _send(worker.stdin, "go")
            found = [_receive(worker.stdout) for worker in workers]
            latencies = [us for times, _ in found for us in times]
            return Seen(latencies, seconds, sum(cpu for _, cpu in found), answers)

        yield go
    except (EOFError, BrokenPipeError):
        raise RuntimeError(f"a client of {address} failed: see what it said above") from None
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _send(pipe: Any, what: Any) -> None:
    pickle.dump(what, pipe)
    pipe.flush()


def _receive(pipe: Any) -> Any:
    return pickle.load(pipe)


def make_request(
    service: Service, inputs: Mapping[str, Mapping[str, torch.Tensor]], n: int
) -> bytes:
    """A serialized ModelInferRequest with the first n rows of the inputs, in the service's form."""
    from tritonclient.grpc import service_pb2

    from serving.triton.config import DIGEST
    from serving.wire import locations
    from soa.memory import Collection, argument_tensors

    request = service_pb2.ModelInferRequest(
        model_name=service.name, model_version=str(service.number)
    )
    request.parameters[DIGEST].string_param = service.digest
    signature = service.signature
    filled = {name: Collection(layout, n) for name, layout in signature.layouts.items()}
    for name in signature.input_collections:
        for column in signature.layouts[name].columns:
            filled[name].fill(column.name, inputs[name][column.name])
    rows = dict.fromkeys(signature.dims, n)
    memory = [argument.numpy() for argument in argument_tensors(signature, filled, rows)]
    places = locations(signature, service.wire.inputs, "input")
    for t in service.wire.inputs:
        values = t.gather(places[t.name].parts(memory), 0, n)
        request.inputs.add(name=t.name, datatype=t.datatype, shape=values.shape)
        request.raw_input_contents.append(values.tobytes())
    for t in service.wire.outputs:
        request.outputs.add(name=t.name)
    made: bytes = request.SerializeToString()
    return made


async def _work(address: str, request: bytes, count: int, seconds: float, core: int | None) -> None:
    """Run `count` clients in this process; they begin after a message on its standard input."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    options = [("grpc.use_local_subchannel_pool", 1)]  # each channel has its own connection
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(count)]
    calls = [channel.unary_unary(_METHOD) for channel in channels]
    answers = [await call(request, timeout=_CALL_S) for call in calls]
    _send(sys.stdout.buffer, answers)
    _receive(sys.stdin.buffer)
    size = len(answers[0])
    cpu = time.process_time()
    until = time.perf_counter() + seconds
    found = await asyncio.gather(*(_client(call, request, size, until) for call in calls))
    cpu = time.process_time() - cpu
    _send(sys.stdout.buffer, ([us for times in found for us in times], cpu))
    for channel in channels:
        await channel.close()


async def _client(call: Any, request: bytes, size: int, until: float) -> list[float]:
    times: list[float] = []
    while (begun := time.perf_counter()) < until:
        answer = await call(request, timeout=_CALL_S)
        times.append((time.perf_counter() - begun) * 1e6)
        _check(answer, size)
    return times


def _check(answer: bytes, size: int) -> None:
    if len(answer) != size:
        raise RuntimeError(f"an answer of {len(answer)} bytes, the first had {size}")


if __name__ == "__main__":
    asyncio.run(_work(*_receive(sys.stdin.buffer)))
