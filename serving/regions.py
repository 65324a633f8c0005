"""Regions of shared memory: one for each request in flight, used again by the next.

After a failure a region is let go instead, since a server that comes late may still write into it.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

CLOSE_S = 1.0  # for a server to take note; one that is gone needs no telling
_SMALLEST = 1 << 16


class Sized(Protocol):
    @property
    def size(self) -> int:
        """In bytes."""


R = TypeVar("R", bound=Sized)


class Pool(ABC, Generic[R]):
    """Any number of threads may take a region at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[R] = []

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[R]:
        """A region of at least `size` bytes for one request. Raises RemoteError, ServingError."""
        with self._lock:
            region = self._free.pop() if self._free else None
        if region is not None and region.size < size:
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

    def forget(self) -> list[Any]:
        """Let go of those that nobody uses now: a server that was started anew knows none."""
        with self._lock:
            regions, self._free = self._free, []
        return [self._let_go(region) for region in regions]

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _make(self, size: int) -> R:
        """A new region that the server knows."""

    @abstractmethod
    def _let_go(self, region: R) -> Any:
        """It is never used again: free it, and tell the server, without waiting."""
