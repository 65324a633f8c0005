"""SQLite as tests use it."""

from __future__ import annotations

import sqlite3
from functools import cache
from pathlib import Path
from typing import Any


def quick_commits() -> None:
    """SQLite leaves it to the kernel when its files reach the disk: a killed process loses nothing
    by that, and no test pulls the plug. MLflow commits dozens of times a test, and each time would
    wait for the disk. Each time it opens a database it also reads the sources of all its migrations
    for the newest revision, which stays the same. And it makes the tables of a new one by all those
    migrations: here once in a process, and the next new database is a copy of the first one."""
    from mlflow.store.db import utils
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    @event.listens_for(Engine, "connect")
    def connected(connection: Any, record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous = OFF")

    utils._get_latest_schema_revision = cache(utils._get_latest_schema_revision)
    make_tables: Any = utils._initialize_tables
    made: list[bytes] = []

    def tables(engine: Any) -> None:
        file = Path(engine.url.database)
        if made:
            file.write_bytes(made[0])
        else:
            make_tables(engine)
            made.append(file.read_bytes())

    utils._initialize_tables = tables
