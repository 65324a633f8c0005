"""Run clients and a server on separate cores of one machine.

On shared cores the scheduler decides which of them waits. Every server here runs in its own
session, and Linux gives such a session half of the machine, however many clients there are
(autogroups).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def two_cores() -> tuple[int, int]:
    """A core for clients and a core for a server. Raises RuntimeError if there is only one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("clients and server need a core each, and this process may use one only")
    return cores[0], cores[1]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Threads and processes that this thread starts in the block stay on that core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
