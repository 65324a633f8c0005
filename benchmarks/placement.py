"""Which core runs what: clients and a server on one machine, each on a core of its own.

On shared cores the scheduler decides who waits: Linux gives a server in a session of its own, as
every server here is, half of a machine that it shares with any number of clients (autogroups).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def two_cores() -> tuple[int, int]:
    """One for clients and one for a server. Raises RuntimeError where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("clients and server need a core each, and this process may use one only")
    return cores[0], cores[1]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What this thread starts meanwhile, threads and processes, stays on that core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
