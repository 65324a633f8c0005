"""System shared memory between a client and a server on one host: one region per request in flight.

A region is used again by the next request. After a failure it is let go instead, since a server
that comes late may still write into it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from serving.client import Client
from serving.errors import RefusedError, ServingError
from serving.wire import Array

_SMALLEST = 1 << 16
_CLOSE_S = 1.0  # for a server to take note; one that is gone needs no telling


@dataclass(frozen=True)
class Region:
    """Registered with the server as `name`; `memory` is all of it, as bytes."""

    name: str
    memory: Array
    handle: Any


class Regions:
    """A client's regions. Any number of threads may take one at once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._free: list[Region] = []

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[Region]:
        """A region of at least `size` bytes for one request. Raises RemoteError, ServingError."""
        with self._lock:
            region = self._free.pop() if self._free else None
        if region is not None and region.memory.size < size:
            self._let_go(region)
            region = None
        region = region or self._make(max(_SMALLEST, 1 << (size - 1).bit_length()))
        try:
            yield region
        except BaseException:
            self._let_go(region)
            raise
        with self._lock:
            self._free.append(region)

    def forget(self) -> None:
        """Let go of those that nobody uses now: a server that was started anew knows none."""
        self._let_all_go()

    def close(self) -> None:
        for answer in self._let_all_go():
            with contextlib.suppress(
                grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError
            ):
                answer.result(_CLOSE_S)

    def _let_all_go(self) -> list[Any]:
        with self._lock:
            regions, self._free = self._free, []
        return [self._let_go(region) for region in regions]

    def _make(self, size: int) -> Region:
        from tritonclient.utils import shared_memory

        name = f"soa_{os.getpid()}_{uuid.uuid4().hex[:12]}"
        try:
            handle = shared_memory.create_shared_memory_region(name, f"/{name}", size)
            memory = shared_memory.get_contents_as_numpy(handle, np.uint8, [size])
        except (OSError, shared_memory.SharedMemoryException) as error:
            raise ServingError(f"no shared memory of {size} bytes on this host: {error}") from None
        region = Region(name, memory, handle)
        try:
            self._client.share(name, f"/{name}", size)
        except RefusedError as error:
            self._destroy(region)
            raise RefusedError(f"{error}: shared memory needs client and server on one host") from (
                None
            )
        except BaseException:
            self._destroy(region)
            raise
        return region

    def _let_go(self, region: Region) -> Any:
        """Free our side now; the server frees its own when it gets to it."""
        self._destroy(region)
        return self._client.unshare(region.name)

    @staticmethod
    def _destroy(region: Region) -> None:
        from tritonclient.utils import shared_memory

        shared_memory.destroy_shared_memory_region(region.handle)
