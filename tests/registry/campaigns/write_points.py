"""A process that gets a signal at one of its writes to a registry.

The writes are counted from 0: every commit of MLflow's database that changes something, and every
file or folder that is created, renamed or removed. A signal comes just before the write; SIGKILL
also comes when a created file exists and is still empty. SQLAlchemy reports commits, and Python's
audit events report files, so no write can be missed.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

# The argument of an audit event that holds the descriptor of the folder of a relative path.
_FOLDER = {"os.mkdir": 2, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.link": 2}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def stop_at(wanted: int, root: Path, sign: signal.Signals, say: Callable[[str], None]) -> None:
    """Send `sign` to this process at its `wanted`-th write.

    Only files below `root` count. `say` is called with a description of the write.
    """
    stop = _Stop(wanted, root, sign, say)
    event.listen(Engine, "before_cursor_execute", stop.statement)
    event.listen(Engine, "commit", stop.commit)
    sys.addaudithook(stop.audit)


class _Stop:
    """Counts the writes of this process, not of its forks, and sends the signal at one of them."""

    def __init__(
        self, wanted: int, root: Path, sign: signal.Signals, say: Callable[[str], None]
    ) -> None:
        self.wanted, self.root, self.sign, self.say = wanted, root, sign, say
        self.count = itertools.count()
        self.changes = ""
        self.ours = os.getpid()

    def reach(self, description: str, prepare: Callable[[], None] = lambda: None) -> None:
        """Counts a write that is about to happen; `prepare` runs just before the signal."""
        if os.getpid() == self.ours and next(self.count) == self.wanted:
            self.say(description)
            prepare()
            os.kill(self.ours, self.sign)

    def statement(self, _1: object, _2: object, text: str, *_: object) -> None:
        if not text.startswith(("SELECT", "PRAGMA")):
            self.changes = " ".join(text.split()[:3])

    def commit(self, connection: Any) -> None:
        if connection.connection.dbapi_connection.in_transaction:
            self.reach(f"commit of {self.changes}")

    def audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open":
            self.opening(arguments[0], arguments[2])
        elif name in _FOLDER:
            path = _whole_path(arguments[0], arguments[_FOLDER[name]])
            # It writes nothing if it fails because the file exists, or does not exist.
            if _counts(path, self.root) and os.path.lexists(path) != (name == "os.mkdir"):
                self.reach(f"{name.removeprefix('os.')} of {_shown(path, self.root)}")

    def opening(self, path: Any, flags: int) -> None:
        if isinstance(path, int) or not flags & _WRITING or not _counts(path, self.root):
            return
        self.reach(f"creation of {_shown(path, self.root)}")
        if self.sign == signal.SIGKILL:
            create = partial(os.open, path, flags | os.O_CREAT, 0o644)
            self.reach(f"content of {_shown(path, self.root)}", lambda: os.close(create()))


def _whole_path(path: Any, folder: int) -> Any:
    """`folder` is the descriptor of a relative path's folder, or negative."""
    return path if folder < 0 else Path(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(path))


def _counts(path: Any, root: Path) -> bool:
    name = os.fsdecode(path)
    return name.startswith(f"{root}/") and not name.endswith(".lock")


def _shown(path: Any, root: Path) -> str:
    return os.fsdecode(path).removeprefix(f"{root}/")
