"""A process that gets a signal at one of its writes to a registry.

The writes are counted from 0: every commit of MLflow's database that changes something, and every
file or folder that is created, renamed or removed. A signal comes just before the write; SIGKILL
also when a created file is there and still empty. Commits are told by SQLAlchemy and files by
Python's audit events, so no list of functions can miss one.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Which argument of an audit event is the descriptor of the folder that its path is relative to.
_FOLDER = {"os.mkdir": 2, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.link": 2}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def stop_at(wanted: int, root: Path, sign: signal.Signals, say: Callable[[str], None]) -> None:
    """Send `sign` to this process at its write of number `wanted`. `root`: whose files count.
    `say` is told which write that is."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    count = itertools.count()
    changes = ""
    ours = os.getpid()

    def come(what: str, prepare: Callable[[], None] = lambda: None) -> None:
        if os.getpid() == ours and next(count) == wanted:
            say(what)
            prepare()
            os.kill(ours, sign)

    def statement(_1: object, _2: object, text: str, *_: object) -> None:
        nonlocal changes
        if not text.startswith(("SELECT", "PRAGMA")):
            changes = " ".join(text.split()[:3])

    def commit(connection: Any) -> None:
        if connection.connection.dbapi_connection.in_transaction:
            come(f"commit of {changes}")

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open":
            path, _, flags = arguments
            if isinstance(path, int) or not flags & _WRITING or not _counts(path, root):
                return
            come(f"creation of {_shown(path, root)}")
            if sign == signal.SIGKILL:
                come(
                    f"content of {_shown(path, root)}",
                    lambda: os.close(os.open(path, flags | os.O_CREAT, 0o644)),
                )
        elif name in _FOLDER:
            path = arguments[0]
            if (folder := arguments[_FOLDER[name]]) >= 0:
                path = Path(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(path))
            # What fails because it is there already, or not there, writes nothing.
            if _counts(path, root) and os.path.lexists(path) != (name == "os.mkdir"):
                come(f"{name.removeprefix('os.')} of {_shown(path, root)}")

    event.listen(Engine, "before_cursor_execute", statement)
    event.listen(Engine, "commit", commit)
    sys.addaudithook(audit)


def _counts(path: Any, root: Path) -> bool:
    name = os.fsdecode(path)
    return name.startswith(f"{root}/") and not name.endswith(".lock")


def _shown(path: Any, root: Path) -> str:
    return os.fsdecode(path).removeprefix(f"{root}/")
