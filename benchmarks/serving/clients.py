"""Clients of a Triton server: `python -m benchmarks.serving.clients ADDRESS FILE CLIENTS SECONDS`.

Each client sends the prepared request in FILE again and again, over its own connection, one at a
time. To use little CPU time they run on an event loop, and do not parse answers. Prints the time of
each request in microseconds, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc

_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_CALL_S = 60.0


async def main(address: str, request: bytes, clients: int, seconds: float) -> list[float]:
    """The times of all requests in µs. Each client first sends one that is not counted."""
    options = [("grpc.use_local_subchannel_pool", 1)]  # each channel has its own connection
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(clients)]
    calls = [channel.unary_unary(_METHOD) for channel in channels]
    answers = [await call(request, timeout=_CALL_S) for call in calls]
    until = time.perf_counter() + seconds
    size = len(answers[0])
    times_of = await asyncio.gather(*(_client(call, request, size, until) for call in calls))
    for channel in channels:
        await channel.close()
    return [us for times in times_of for us in times]


async def _client(call: Any, request: bytes, size: int, until: float) -> list[float]:
    """The times in µs of the requests of one client. Raises RuntimeError for an answer that is not
    of `size` bytes, such as an error."""
    times: list[float] = []
    while (begun := time.perf_counter()) < until:
        answer = await call(request, timeout=_CALL_S)
        times.append((time.perf_counter() - begun) * 1e6)
        if len(answer) != size:
            raise RuntimeError(f"an answer of {len(answer)} bytes, the first had {size}")
    return times


if __name__ == "__main__":
    address, file, clients, seconds = sys.argv[1:]
    running = main(address, Path(file).read_bytes(), int(clients), float(seconds))
    print(json.dumps(asyncio.run(running)))
