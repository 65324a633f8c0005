"""Support for forks. A child has only the thread that forked, and a copy of the parent's memory.

The child lacks the other threads, pools and connections of the parent. It shares the shared memory,
and a lock that another thread held is never released. Objects that need these can be used only in
the process that made them (`OwnProcess`). Other objects are repaired in the child
(`repair_after_fork`).
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
    """Remembers the process in which it was made, for an object that works only there. `name` is
    what the error calls that object."""

    def __init__(self, name: str = "session") -> None:
        self._name = name
        self._pid = os.getpid()

    def here(self) -> bool:
        """True in the process that made this object."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise RunError unless this is the process that made this object."""
        if os.getpid() != self._pid:
            raise RunError(
                f"this {self._name} was opened before a fork, by another process: open one in each"
            )


class _Forkable(Protocol):
    def after_fork(self) -> None:
        """Repair the object; called in the child of a fork."""


_repaired: weakref.WeakSet[_Forkable] = weakref.WeakSet()
_forked_thread: int | None = None
"""The identifier of the thread that survived a fork, in a forked child in which that thread cannot
use OpenMP's threads. None in other processes."""


def repair_after_fork(forkable: _Forkable) -> None:
    """Call the object's `after_fork` in every forked child, as long as the object exists."""
    _repaired.add(forkable)


class Lock:
    """A lock that is not held in a forked child."""

    def __init__(self) -> None:
        self.after_fork()
        repair_after_fork(self)

    def after_fork(self) -> None:
        """Take a new lock that is free: no thread of the child holds the former one."""
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def require_openmp(threads: int) -> None:
    """Raise RunError if a run with so many threads would never end.

    That is so with several threads in the thread that survived a fork: libgomp would wait there for
    worker threads that exist only in the parent.
    """
    if threads > 1 and threading.get_ident() == _forked_thread:
        raise RunError(
            f"OpenMP's threads do not come through a fork, and a run of {threads} would wait for "
            "them: use 1 thread here (load's threads=, torch.set_num_threads), or another way to "
            "start processes"
        )


def allow_openmp() -> None:
    """Allow runs with several threads in this forked child, whose parent had not started any of
    OpenMP's threads."""
    global _forked_thread
    _forked_thread = None
    if native := sys.modules.get("engines.native._native"):  # it sees forks by itself
        native.openmp_unused()


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _repair_all() -> None:
    """Repair the objects that need it. Python calls this in every forked child, before other
    code."""
    global _forked_thread
    _forked_thread = threading.get_ident()
    for forkable in list(_repaired):
        forkable.after_fork()


os.register_at_fork(after_in_child=_repair_all)
