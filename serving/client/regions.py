"""System shared memory between a client and a server on one host, in regions.

Each request in progress has one region, which a later request uses again. After a failure or a
retry the region is given up, because a late server may still write into it. The server does not
unregister a region while a request uses it; the client then asks again later.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from serving.client.calls import Client
from serving.errors import RefusedError, ServingError

_CLOSE_S = 1.0  # how long `close` waits for the server's answers; a dead server sends none
_ASK_AGAIN_S = 1.0  # the time between two requests to forget a region
_POLL_S = 0.05  # the same, in `close`
_SMALLEST = 1 << 16  # bytes of the smallest region


@dataclass(eq=False)
class Region:
    """A region of `size` bytes of shared memory, which the server knows as `name`.

    `memory`: all its bytes. `handle`: what tritonclient returned for it. `doubtful`: a late server
    may still write into it, so no other request may use it.
    """

    name: str
    size: int
    memory: np.ndarray[Any, np.dtype[np.uint8]]
    handle: Any
    doubtful: bool = False

    def doubt(self) -> None:
        """Mark the region as doubtful, so that no other request uses it."""
        self.doubtful = True


@dataclass(frozen=True)
class _Leaving:
    """A region that the server was asked to forget.

    `answer`: gRPC's future of the answer. `asked_at`: the time on the monotonic clock.
    """

    name: str
    answer: Any
    asked_at: float


class Regions:
    """A client's regions of shared memory. Any number of threads may take one at once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._free: list[Region] = []
        self._closed = False
        self._leaving: dict[str, _Leaving] = {}

    @contextlib.contextmanager
    def take(self, size: int) -> Iterator[Region]:
        """Take a region of at least `size` bytes for one request, until the `with` block ends.

        Afterwards another request may take it, unless the block raises or the region is doubtful.
        Raises RemoteError or ServingError if there is no region and none can be made.
        """
        self._ask_again()
        with self._lock:
            region = self._free.pop() if self._free else None
        if region is not None and region.size < size:
            self._give_up(region)
            region = None
        if region is None:
            power_of_two = 1 << (size - 1).bit_length()  # the smallest with room for `size` bytes
            region = self._make_region(max(_SMALLEST, power_of_two))
        try:
            yield region
        except BaseException:
            self._give_up(region)
            raise
        with self._lock:
            reusable = not (region.doubtful or self._closed)
            if reusable:
                self._free.append(region)
        if not reusable:
            self._give_up(region)

    def give_up_unused(self) -> None:
        """Give up the regions that are not in use.

        For example the server was restarted, and no longer knows them.
        """
        with self._lock:
            unused, self._free = self._free, []
        for region in unused:
            self._give_up(region)

    def close(self) -> None:
        """Tell the server to forget all regions, and wait at most a second for it."""
        with self._lock:
            self._closed = True
        self.give_up_unused()
        until = time.monotonic() + _CLOSE_S
        while self._leaving and (remaining_s := until - time.monotonic()) > 0:
            answer = next(iter(self._leaving.values())).answer
            with contextlib.suppress(
                grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError
            ):
                answer.result(remaining_s)
            if answer.done() and answer.code() is grpc.StatusCode.UNAVAILABLE:
                return  # the server has ended, and its side of all regions with it
            self._ask_again(_POLL_S)
            if self._leaving:
                time.sleep(_POLL_S)

    def _make_region(self, size: int) -> Region:
        """Make a region of `size` bytes, and register it with the server.

        Raises RemoteError, or ServingError if this host has no memory for it.
        """
        name = f"soa_{os.getpid()}_{uuid.uuid4().hex[:12]}"
        region = _allocate(name, size)
        try:
            self._client.share(name, f"/{name}", size)
        except RefusedError as error:
            _release(region)
            raise RefusedError(
                f"{error}: shared memory needs client and server on one host"
            ) from None
        except BaseException:
            self._give_up(region)  # the server may have received the request
            raise
        return region

    def _give_up(self, region: Region) -> None:
        """Free our side of a region, and ask the server to forget it. It is never used again."""
        _release(region)
        self._ask_to_forget(region.name)

    def _ask_to_forget(self, name: str) -> None:
        """Ask the server to forget a region, without waiting. The caller must not hold the lock."""
        answer = self._client.unshare(name)
        if answer is not None:  # else the connection is closed, so the server cannot answer
            with self._lock:
                self._leaving[name] = _Leaving(name, answer, time.monotonic())

    def _ask_again(self, after_s: float | None = None) -> None:
        """Ask the server again to forget the regions that it has refused to forget.

        This is done for regions for which it was asked at least `after_s` seconds ago; None means
        `_ASK_AGAIN_S`.
        """
        if not self._leaving:
            return
        after_s = _ASK_AGAIN_S if after_s is None else after_s
        with self._lock:  # afterwards no other thread handles these regions
            answered = [leaving for leaving in self._leaving.values() if leaving.answer.done()]
            for leaving in answered:
                del self._leaving[leaving.name]
        for leaving in answered:
            if leaving.answer.code() is grpc.StatusCode.OK:
                continue
            if time.monotonic() - leaving.asked_at >= after_s:
                self._ask_to_forget(leaving.name)
            else:
                with self._lock:
                    self._leaving[leaving.name] = leaving


def _allocate(name: str, size: int) -> Region:
    """Allocate a region of shared memory. The server does not know it yet. Raises ServingError."""
    from tritonclient.utils import shared_memory

    try:
        handle = shared_memory.create_shared_memory_region(name, f"/{name}", size)
        memory = shared_memory.get_contents_as_numpy(handle, np.uint8, [size])
    except (OSError, shared_memory.SharedMemoryException) as error:
        raise ServingError(f"no shared memory of {size} bytes on this host: {error}") from None
    return Region(name, size, memory, handle)


def _release(region: Region) -> None:
    """Unmap and remove our side of a region. Its `memory` must not be used afterwards."""
    from tritonclient.utils import shared_memory

    shared_memory.destroy_shared_memory_region(region.handle)
