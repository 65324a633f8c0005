"""Makes SQLite and MLflow quick in the tests."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def quick_commits() -> None:
    """Saves time in MLflow's database; the tests lose nothing by it.

    SQLite leaves it to the kernel when its files reach the disk: this is safe if a process is
    killed, and no test cuts the power. MLflow commits dozens of times per test, and each commit
    would wait for the disk. Each time it opens a database, MLflow also reads the sources of all its
    migrations for the newest revision; here it does so once. The tables of a new database, which
    take a second to make, are copied from the first one that this process made.
    """
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
    """A function that makes the tables of a new database once, and then copies its file."""
    first: list[bytes] = []

    def tables(engine: Any) -> None:
        file = Path(engine.url.database or "/")
        new = not file.exists() or (file.is_file() and file.stat().st_size == 0)
        if new and first:
            with contextlib.suppress(OSError):  # a full disk: MLflow fails below
                file.write_bytes(first[0])
                return
        make_tables(engine)
        if new:
            first.append(file.read_bytes())

    return tables
