"""System shared memory between a client and a server on one host, see serving/client/regions.py.

A server keeps a region for as long as a request in it uses it, and refuses to forget it: it is told
again, else its memory would stay there for good.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from serving.client.calls import Client
from serving.client.regions import CLOSE_S, Pool, Shared
from serving.errors import RefusedError, ServingError
from serving.wire import Array

_REMIND_S = 1.0  # between two times that it is told
_POLL_S = 0.05


@dataclass(eq=False)
class Region(Shared):
    """Registered with the server as `name`; `memory` is all of it, as bytes."""

    name: str
    memory: Array
    handle: Any

    @property
    def size(self) -> int:
        return int(self.memory.size)


class Regions(Pool[Region]):
    """A client's regions."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._told: dict[str, tuple[Any, float]] = {}
        """Regions that the server is to forget: gRPC's future, and since when."""

    def _before(self) -> None:
        self._remind()

    def _wait_for_server(self) -> None:
        until = time.monotonic() + CLOSE_S
        while self._told and (left := until - time.monotonic()) > 0:
            told, _ = next(iter(self._told.values()))
            with contextlib.suppress(
                grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError
            ):
                told.result(left)
            if told.done() and told.code() is grpc.StatusCode.UNAVAILABLE:
                return
            self._remind(_POLL_S)
            time.sleep(_POLL_S if self._told else 0)

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

    def _let_go(self, region: Region) -> None:
        """Free our side now; the server frees its own when it gets to it."""
        self._destroy(region)
        self._tell(region.name)

    def _tell(self, name: str) -> None:
        answer = self._client.unshare(name)
        with self._lock:
            if answer is None:
                self._told.pop(name, None)
            else:
                self._told[name] = (answer, time.monotonic())

    def _remind(self, after_s: float = _REMIND_S) -> None:
        """Tell the server again of what it has not forgotten."""
        if not self._told:
            return
        with self._lock:
            answered = {name: at for name, at in self._told.items() if at[0].done()}
            for name, (answer, _) in answered.items():
                if answer.code() is grpc.StatusCode.OK:
                    del self._told[name]
        for name, (_, since) in answered.items():
            if name in self._told and time.monotonic() - since >= after_s:
                self._tell(name)

    @staticmethod
    def _destroy(region: Region) -> None:
        from tritonclient.utils import shared_memory

        shared_memory.destroy_shared_memory_region(region.handle)
