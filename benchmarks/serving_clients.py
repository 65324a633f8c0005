"""Clients of a server of Triton's protocol, in processes of their own: what each request took.

They send one request, made beforehand, again and again, each over a connection of its own with one
request on its way. They parse no answer while they are timed and run on an event loop, because
clients and server share this machine: `python -m benchmarks.serving` prints what they take of it.
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
    """What the clients saw together: each round in microseconds, and the first answer of each.

    A round is a request, or `burst` of them. `cpu_s` is what they themselves took of the CPU.
    """

    latencies_us: list[float]
    seconds: float
    cpu_s: float
    answers: list[bytes]
    burst: int = 1

    @property
    def requests(self) -> int:
        return len(self.latencies_us) * self.burst

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds


@contextmanager
def connected(
    address: str,
    request: bytes,
    clients: int,
    seconds: float,
    *,
    burst: int = 1,
    core: int | None = None,
) -> Iterator[Callable[[], Seen]]:
    """Clients of host:port that had an answer to `request`, a ModelInferRequest. Called once, what
    is yielded lets all of them send it at once for that long.

    A client sends `burst` at a time, over as many connections, and waits for all of them. `core`:
    one process for all clients, on that core; else two, on any. Raises RuntimeError where a client
    fails: none is left out of the count.
    """
    count = _PROCESSES if core is None else 1
    shares = [share for i in range(count) if (share := len(range(i, clients, count)))]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving_clients"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for _ in shares
    ]  # fmt: skip
    try:
        for worker, share in zip(workers, shares, strict=True):
            _send(worker.stdin, (address, request, share, burst, seconds, core))
        answers = [answer for worker in workers for answer in _receive(worker.stdout)]

        def go() -> Seen:
            for worker in workers:
                _send(worker.stdin, "go")
            found = [_receive(worker.stdout) for worker in workers]
            latencies = [us for times, _ in found for us in times]
            return Seen(latencies, seconds, sum(cpu for _, cpu in found), answers, burst)

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
    """A ModelInferRequest with the first n rows of the inputs, in the form that is served."""
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


async def _work(
    address: str, request: bytes, count: int, burst: int, seconds: float, core: int | None
) -> None:
    """In a process of its own: that many clients, from the word on its standard input."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each request on its way
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(count * burst)]
    calls = [channel.unary_unary(_METHOD) for channel in channels]
    answers = [await call(request, timeout=_CALL_S) for call in calls]
    _send(sys.stdout.buffer, answers)
    _receive(sys.stdin.buffer)
    size = len(answers[0])
    cpu = time.process_time()
    until = time.perf_counter() + seconds
    if burst == 1:
        clients = [_client(call, request, size, until) for call in calls]
    else:
        clients = [
            _bursts(calls[i : i + burst], request, size, until) for i in range(0, len(calls), burst)
        ]
    found = await asyncio.gather(*clients)
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


async def _bursts(calls: list[Any], request: bytes, size: int, until: float) -> list[float]:
    times: list[float] = []
    while (begun := time.perf_counter()) < until:
        sent = [call(request, timeout=_CALL_S) for call in calls]
        answers = [await each for each in sent]
        times.append((time.perf_counter() - begun) * 1e6)
        for answer in answers:
            _check(answer, size)
    return times


def _check(answer: bytes, size: int) -> None:
    if len(answer) != size:
        raise RuntimeError(f"an answer of {len(answer)} bytes, the first had {size}")


if __name__ == "__main__":
    asyncio.run(_work(*_receive(sys.stdin.buffer)))
