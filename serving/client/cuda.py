"""CUDA shared memory between a client and a server on one host, one region per request in flight.

As serving/client/system.py does, with one difference: CUDA allows memory to be freed only once the
other process has closed it. Triton says so by no longer knowing the region; one of which it never
says so is kept until this process ends.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from serving.client.calls import Client
from serving.client.cuda_memory import CudaMemory
from serving.client.regions import CLOSE_S, Pool, Shared
from serving.errors import RefusedError, RemoteError, VersionMismatchError


@dataclass(eq=False)
class CudaRegion(Shared):
    """Registered with the server as `name`; `memory` is all of it, as bytes on the GPU."""

    name: str
    memory: torch.Tensor
    owner: CudaMemory

    @property
    def size(self) -> int:
        return self.memory.numel()


class CudaRegions(Pool[CudaRegion]):
    """A client's regions on one GPU. Any number of threads may take one at once."""

    def __init__(self, client: Client, device: torch.device) -> None:
        super().__init__()
        self._client, self._device = client, device
        self._leaving: list[tuple[CudaRegion, Any]] = []

    def _wait_for_server(self) -> None:
        until = time.monotonic() + CLOSE_S
        for _, answer in self._leaving:
            with contextlib.suppress(
                grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError
            ):
                answer.result(max(0.0, until - time.monotonic()))
        self._free_what_left()

    def _make(self, size: int) -> CudaRegion:
        self._free_what_left()
        owner = CudaMemory(size, self._device)
        name = f"soa_{os.getpid()}_{uuid.uuid4().hex[:12]}"
        region = CudaRegion(name, owner.tensor, owner)
        try:
            register(self._client, name, owner.handle, self._device.index, size)
        except RefusedError:
            owner.free()
            raise
        except BaseException:
            self._let_go(region)  # it may have got there
            raise
        return region

    def _let_go(self, region: CudaRegion) -> None:
        answer = self._client.unshare_cuda(region.name)
        if answer is None:  # closed: whether the server has let go of it, nobody can say any more
            return
        with self._lock:
            self._leaving.append((region, answer))

    def _free_what_left(self) -> None:
        """Those that the server has let go of, which it does once no request uses them. One that it
        refused to let go of is asked for again."""
        with self._lock:
            leaving, self._leaving = self._leaving, []
        for region, answer in leaving:
            if not answer.done():
                with self._lock:
                    self._leaving.append((region, answer))
            elif self._is_unknown(region):
                region.owner.free()
            else:
                self._let_go(region)

    def _is_unknown(self, region: CudaRegion) -> bool:
        try:
            self._client.cuda_status(region.name, CLOSE_S)
        except VersionMismatchError:  # not found
            return True
        except RemoteError:
            pass
        return False


def register(client: Client, name: str, handle: bytes, device: int, size: int) -> None:
    """Make a region known to the server; raises RemoteError."""
    try:
        client.share_cuda(name, handle, device, size)
    except RefusedError as error:
        raise RefusedError(
            f"{error}: CUDA shared memory needs a server with CUDA on this host, which sees GPU "
            f"{device} under that number: else use shared_memory='system', or none"
        ) from None
