"""Forks. A child has the one thread that forked, and the memory as it was at that moment.

Threads, pools and connections of the parent are not there, shared memory is shared with it, and a
lock that another thread held is never let go. What cannot do without these stays with its process;
the rest is told when it comes through a fork.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from engines.errors import RunError


class OwnProcess:
    """The process that made it, for what belongs to one: `what` names it in the error."""

    def __init__(self, what: str = "session") -> None:
        self._what = what
        self._pid = os.getpid()

    def here(self) -> bool:
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise RunError in any other."""
        if os.getpid() != self._pid:
            raise RunError(
                f"this {self._what} was opened before a fork, by another process: open one in each"
            )


class _Forkable(Protocol):
    def after_fork(self) -> None:
        """Set right what a fork has left, in the child."""


_told: weakref.WeakSet[_Forkable] = weakref.WeakSet()
_came_through: int | None = None


def tell(each: _Forkable) -> None:
    """Call its `after_fork` in every child, as long as it lives."""
    _told.add(each)


class Lock:
    """A lock that is free in a child."""

    def __init__(self) -> None:
        self.after_fork()
        tell(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def require_openmp(threads: int) -> None:
    """Raise RunError where a run with several threads would never end.

    That is in the thread that came through a fork: libgomp waits there for worker threads that
    exist in the parent alone.
    """
    if threads > 1 and threading.get_ident() == _came_through:
        raise RunError(
            f"OpenMP's threads do not come through a fork, and a run of {threads} would wait for "
            "them: use 1 thread here (load's threads=, torch.set_num_threads), or another way to "
            "start processes"
        )


def _in_child() -> None:
    global _came_through
    _came_through = threading.get_ident()
    for each in list(_told):
        each.after_fork()


os.register_at_fork(after_in_child=_in_child)
