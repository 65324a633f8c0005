"""A session of servers stays with the process that opened it.

A fork copies neither threads nor connections, but it shares shared memory: parent and child would
write their requests into one region, and each would read the other's answers. A pool without its
threads never runs what it is given.
"""

from __future__ import annotations

import os

from engines.errors import RunError


class OwnProcess:
    """The process that made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def here(self) -> bool:
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise RunError in any other."""
        if os.getpid() != self._pid:
            raise RunError(
                "this session was opened before a fork, by another process: load one in each"
            )
