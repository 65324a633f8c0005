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
    options = [("grpc.use_local_subchannel_pool", 1)]  # each channel has its own connection
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(clients)]
    calls = [channel.unary_unary(_METHOD) for channel in channels]
    answers = [await call(request, timeout=_CALL_S) for call in calls]
    until = time.perf_counter() + seconds
    found = await asyncio.gather(*(_client(c, request, len(answers[0]), until) for c in calls))
    for channel in channels:
        await channel.close()
    return [us for times in found for us in times]


async def _client(call: Any, request: bytes, size: int, until: float) -> list[float]:
    times: list[float] = []
    while (begun := time.perf_counter()) < until:
        answer = await call(request, timeout=_CALL_S)
        times.append((time.perf_counter() - begun) * 1e6)
        if len(answer) != size:
            raise RuntimeError(f"an answer of {len(answer)} bytes, the first had {size}")
    return times


if __name__ == "__main__":
    at, file, count, limit = sys.argv[1:]
    print(json.dumps(asyncio.run(main(at, Path(file).read_bytes(), int(count), float(limit)))))
