"""System shared memory between a client and a server on one host, see serving/regions.py."""

from __future__ import annotations

import contextlib
import os
import uuid
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from serving.client import Client
from serving.errors import RefusedError, ServingError
from serving.regions import CLOSE_S, Pool
from serving.wire import Array


@dataclass(frozen=True)
class Region:
    """Registered with the server as `name`; `memory` is all of it, as bytes."""

    name: str
    memory: Array
    handle: Any

    @property
    def size(self) -> int:
        return int(self.memory.size)


class Regions(Pool[Region]):
    """A client's regions. Any number of threads may take one at once."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client

    def close(self) -> None:
        for answer in self.forget():
            with contextlib.suppress(
                grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError
            ):
                answer.result(CLOSE_S)

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
