"""Shared memory between a client and a server on one host, in regions.

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
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import torch

from serving.client.calls import Client
from serving.errors import RefusedError, RemoteError, ServingError, VersionMismatchError

_CLOSE_S = 1.0  # how long `close` waits for the server's answers; a dead server sends none
_REMIND_S = 1.0  # the time between two requests to forget a region
_POLL_S = 0.05
_SMALLEST = 1 << 16


@dataclass(eq=False)
class Region:
    """A region, registered with the server as `name`. `memory`: all its bytes, as a NumPy array or
    a torch tensor. `owner`: the object that frees it."""

    name: str
    size: int
    memory: Any
    owner: Any
    doubtful: bool = False

    def doubt(self) -> None:
        """Mark the region as unusable for other requests: a late server may still write into it."""
        self.doubtful = True


@dataclass(frozen=True)
class _Leaving:
    """A region that the server was asked to forget at the time `since`; `answer`: gRPC's future."""

    region: Region
    answer: Any
    since: float


class Pool(ABC):
    """A client's regions of one kind. Any number of threads may take one at once."""

    freed_first = True
    """True if our side may be freed while the server still has the region open."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._free: list[Region] = []
        self._closed = False
        self._leaving: dict[str, _Leaving] = {}

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[Region]:
        """A region of at least `size` bytes for one request. Raises RemoteError, ServingError."""
        self._look_after()
        with self._lock:
            region = self._free.pop() if self._free else None
        if region is not None and region.size < size:
            self._let_go(region)
            region = None
        region = region or self._new(max(_SMALLEST, 1 << (size - 1).bit_length()))
        try:
            yield region
        except BaseException:
            self._let_go(region)
            raise
        with self._lock:
            again = not (region.doubtful or self._closed)
            if again:
                self._free.append(region)
        if not again:
            self._let_go(region)

    def forget(self) -> None:
        """Give up the regions that are not in use, for example because the server was restarted and
        no longer knows them."""
        with self._lock:
            regions, self._free = self._free, []
        for region in regions:
            self._let_go(region)

    def close(self) -> None:
        """Tell the server to forget all regions, and wait at most a second for it."""
        with self._lock:
            self._closed = True
        self.forget()
        until = time.monotonic() + _CLOSE_S
        while self._leaving and (left := until - time.monotonic()) > 0:
            answer = next(iter(self._leaving.values())).answer
            with contextlib.suppress(
                grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError
            ):
                answer.result(left)
            if answer.done() and answer.code() is grpc.StatusCode.UNAVAILABLE:
                return
            self._look_after(_POLL_S)
            time.sleep(_POLL_S if self._leaving else 0)

    def _new(self, size: int) -> Region:
        name = f"soa_{os.getpid()}_{uuid.uuid4().hex[:12]}"
        region = self._allocate(name, size)
        try:
            self._share(region)
        except RefusedError:
            self._release(region)
            raise
        except BaseException:
            self._let_go(region)  # the server may have received the request
            raise
        return region

    def _let_go(self, region: Region) -> None:
        """Give up a region; it is never used again."""
        if self.freed_first:
            self._release(region)
        self._tell(region)

    def _tell(self, region: Region) -> None:
        answer = self._unshare(region.name)
        with self._lock:
            if answer is None:  # the connection is closed, so the server cannot answer
                self._leaving.pop(region.name, None)
            else:
                self._leaving[region.name] = _Leaving(region, answer, time.monotonic())

    def _look_after(self, after_s: float | None = None) -> None:
        """Free the regions that the server has forgotten, and ask it again to forget the others."""
        if not self._leaving:
            return
        after_s = _REMIND_S if after_s is None else after_s
        with self._lock:  # afterwards no other thread handles these regions
            answered = [each for each in self._leaving.values() if each.answer.done()]
            for each in answered:
                del self._leaving[each.region.name]
        for each in answered:
            region = each.region
            if each.answer.code() is grpc.StatusCode.OK and self._is_forgotten(region):
                if not self.freed_first:
                    self._release(region)
            elif time.monotonic() - each.since >= after_s:
                self._tell(region)
            else:
                with self._lock:
                    self._leaving[region.name] = each

    @abstractmethod
    def _allocate(self, name: str, size: int) -> Region:
        """Allocate memory that the server does not know yet. Raises ServingError."""

    @abstractmethod
    def _share(self, region: Region) -> None:
        """Register the region with the server. Raises RemoteError."""

    @abstractmethod
    def _unshare(self, name: str) -> Any:
        """Ask the server to forget the region, without waiting. Returns gRPC's future, or None if
        the connection is closed."""

    @abstractmethod
    def _release(self, region: Region) -> None:
        """Free the memory on our side."""

    def _is_forgotten(self, region: Region) -> bool:
        """True if no request in the server uses the region any more, after its OK to forget it."""
        return True


class Regions(Pool):
    """Regions of system shared memory, as NumPy arrays."""

    def _allocate(self, name: str, size: int) -> Region:
        from tritonclient.utils import shared_memory

        try:
            handle = shared_memory.create_shared_memory_region(name, f"/{name}", size)
            memory = shared_memory.get_contents_as_numpy(handle, np.uint8, [size])
        except (OSError, shared_memory.SharedMemoryException) as error:
            raise ServingError(f"no shared memory of {size} bytes on this host: {error}") from None
        return Region(name, size, memory, handle)

    def _share(self, region: Region) -> None:
        try:
            self._client.share(region.name, f"/{region.name}", region.size)
        except RefusedError as error:
            raise RefusedError(
                f"{error}: shared memory needs client and server on one host"
            ) from None

    def _unshare(self, name: str) -> Any:
        return self._client.unshare(name)

    def _release(self, region: Region) -> None:
        from tritonclient.utils import shared_memory

        shared_memory.destroy_shared_memory_region(region.owner)


class CudaRegions(Pool):
    """Regions of memory of one GPU, as torch tensors. No Triton with a GPU has run this.

    CUDA allows memory to be freed only after the other process has closed it. That is the case once
    Triton no longer knows the region. If this never happens, the region is kept until this process
    ends.
    """

    freed_first = False

    def __init__(self, client: Client, device: torch.device) -> None:
        super().__init__(client)
        self._device = device

    def _allocate(self, name: str, size: int) -> Region:
        from serving.client.cuda_memory import CudaMemory

        owner = CudaMemory(size, self._device)
        return Region(name, size, owner.tensor, owner)

    def _share(self, region: Region) -> None:
        index = self._device.index
        try:
            self._client.share_cuda(region.name, region.owner.handle, index, region.size)
        except RefusedError as error:
            raise RefusedError(
                f"{error}: CUDA shared memory needs a server with CUDA on this host, which sees "
                f"GPU {index} under that number: else use shared_memory='system', or none"
            ) from None

    def _unshare(self, name: str) -> Any:
        return self._client.unshare_cuda(name)

    def _release(self, region: Region) -> None:
        region.owner.free()

    def _is_forgotten(self, region: Region) -> bool:
        try:
            self._client.cuda_status(region.name, _CLOSE_S)
        except VersionMismatchError:  # not found
            return True
        except RemoteError:
            pass
        return False
