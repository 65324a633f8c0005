"""Regions of shared memory: one for each request in flight, used again by the next.

After a failure or a retry a region is let go instead, since a server that comes late may still
write into it.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

CLOSE_S = 1.0  # for a server to take note; one that is gone needs no telling
_SMALLEST = 1 << 16


class Shared(ABC):
    """A region that the server knows."""

    doubtful = False

    @property
    @abstractmethod
    def size(self) -> int:
        """In bytes."""

    def doubt(self) -> None:
        """Somebody may write into it later: no other request may have it."""
        self.doubtful = True


R = TypeVar("R", bound=Shared)


class Pool(ABC, Generic[R]):
    """Any number of threads may take a region at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[R] = []
        self._closed = False

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[R]:
        """A region of at least `size` bytes for one request. Raises RemoteError, ServingError."""
        self._before()
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
            again = not (region.doubtful or self._closed)
            if again:
                self._free.append(region)
        if not again:
            self._let_go(region)

    def forget(self) -> None:
        """Let go of those that nobody uses now: a server that was started anew knows none."""
        with self._lock:
            regions, self._free = self._free, []
        for region in regions:
            self._let_go(region)

    def close(self) -> None:
        """Tell the server to forget all of them, for a second at most."""
        with self._lock:
            self._closed = True
        self.forget()
        self._wait_for_server()

    def _before(self) -> None:
        """Each time that one is taken: nothing that waits."""

    @abstractmethod
    def _make(self, size: int) -> R:
        """A new region that the server knows."""

    @abstractmethod
    def _let_go(self, region: R) -> None:
        """It is never used again: free it, and tell the server, without waiting."""

    @abstractmethod
    def _wait_for_server(self) -> None:
        """Until it has forgotten what was let go, for `CLOSE_S` in all."""
