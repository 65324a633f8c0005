"""SQLite as tests use it."""

from __future__ import annotations

import contextlib
import sqlite3
from functools import cache
from typing import Any


def quick_commits() -> None:
    """SQLite leaves it to the kernel when its files reach the disk: a killed process loses nothing
    by that, and no test pulls the plug. MLflow commits dozens of times a test, and each time would
    wait for the disk. Each time it opens a database it also reads the sources of all its migrations
    for the newest revision, which stays the same. And each new database goes through all of these
    migrations, for more than a second: the tables of the first one are copied into the others."""
    from mlflow.store.db import utils
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    @event.listens_for(Engine, "connect")
    def connected(connection: Any, record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous = OFF")

    utils._get_latest_schema_revision = cache(utils._get_latest_schema_revision)
    migrate = utils._initialize_tables
    template = sqlite3.connect(":memory:", check_same_thread=False)

    def initialize(engine: Any) -> None:
        with contextlib.closing(sqlite3.connect(engine.url.database)) as database:
            if template.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
                migrate(engine)  # type: ignore[no-untyped-call]
                database.backup(template)
            else:
                template.backup(database)

    utils._initialize_tables = initialize
