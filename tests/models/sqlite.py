"""SQLite as tests use it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def quick_commits() -> None:
    """SQLite leaves it to the kernel when its files reach the disk: a killed process loses nothing
    by that, and no test pulls the plug. MLflow commits dozens of times a test, and each time would
    wait for the disk. Each time it opens a database it also reads the sources of all its migrations
    for the newest revision, which stays the same. The tables of a new database are those of the
    first one that this process made, which takes a second."""
    from mlflow.store.db import utils
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    @event.listens_for(Engine, "connect")
    def connected(connection: Any, record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous = OFF")

    utils._get_latest_schema_revision = cache(utils._get_latest_schema_revision)
    utils._initialize_tables = _copies(utils._initialize_tables)


def _copies(make_tables: Callable[[Any], None]) -> Callable[[Any], None]:
    first: list[bytes] = []

    def tables(engine: Any) -> None:
        file = Path(engine.url.database or "/")
        new = not file.exists() or (file.is_file() and file.stat().st_size == 0)
        if new and first:
            with contextlib.suppress(OSError):  # a full disk: MLflow itself meets it below
                file.write_bytes(first[0])
                return
        make_tables(engine)
        if new:
            first.append(file.read_bytes())

    return tables
