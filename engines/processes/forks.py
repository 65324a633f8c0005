"""Support for forks. A child has only the thread that forked, and a copy of the parent's memory.

The child lacks the other threads, pools and connections of the parent. It shares the shared memory,
and a lock that another thread held is never released. Objects that need these can be used only in
the process that made them (`OwnProcess`). Other objects are repaired in the child (`tell`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import weakref
from typing import Protocol

from engines.errors import RunError

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class OwnProcess:
    """Remembers the process that made it, for an object that works only there. `name` is what the
    error calls that object."""

    def __init__(self, name: str = "session") -> None:
        self._name = name
        self._pid = os.getpid()

    def here(self) -> bool:
        """True in the process that made this object."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raises RunError in any other process."""
        if os.getpid() != self._pid:
            raise RunError(
                f"this {self._name} was opened before a fork, by another process: open one in each"
            )


class _Forkable(Protocol):
    def after_fork(self) -> None:
        """Repair the object; called in the child of a fork."""


_repaired: weakref.WeakSet[_Forkable] = weakref.WeakSet()
_forked_thread: int | None = None
"""In a forked child: its thread that came through the fork, unless it may use OpenMP's threads."""


def tell(forkable: _Forkable) -> None:
    """Call the object's `after_fork` in every forked child, as long as the object exists."""
    _repaired.add(forkable)


class Lock:
    """A lock that is not held in a forked child."""

    def __init__(self) -> None:
        self.after_fork()
        tell(self)

    def after_fork(self) -> None:
        """Take a new lock that is free: no thread of the child holds the former one."""
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def require_openmp(threads: int) -> None:
    """Raises RunError if a run with several threads would never end.

    This is so in the thread that survived a fork: libgomp waits there for worker threads that exist
    only in the parent.
    """
    if threads > 1 and threading.get_ident() == _forked_thread:
        raise RunError(
            f"OpenMP's threads do not come through a fork, and a run of {threads} would wait for "
            "them: use 1 thread here (load's threads=, torch.set_num_threads), or another way to "
            "start processes"
        )


def openmp_unused() -> None:
    """Allow several threads in this forked child: its parent started none of OpenMP's threads."""
    global _forked_thread
    _forked_thread = None
    if native := sys.modules.get("engines.native._native"):  # it sees forks by itself
        native.openmp_unused()


def end_with_parent() -> None:
    """From now on, the kernel kills this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _in_child() -> None:
    """Called in every forked child, before any other code."""
    global _forked_thread
    _forked_thread = threading.get_ident()
    for forkable in list(_repaired):
        forkable.after_fork()


os.register_at_fork(after_in_child=_in_child)
