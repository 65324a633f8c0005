"""A `Store` that reads the tables of MLflow's database: SQLite, and PostgreSQL with SQLAlchemy.

MLflow changes its tables from release to release, and gives each schema a revision number.
`open_tables` gives a store only for revisions that the tests have compared with MLflow's client;
for other revisions that client must be used. Nothing is written, and no transaction stays open.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from registry.errors import NoRegistryError
from registry.mlflow.store_protocol import (
    PROMPT,
    RunQuery,
    StoredExperiment,
    StoredModel,
    StoredRun,
    StoredVersion,
)

TESTED = frozenset({"dc11669786a5"})
"""The revisions of the tables that can be read: that of MLflow 3.17."""

_NO_LIMIT = 1 << 62  # SQL has no word for "no limit" that both databases take

_MODELS = """
SELECT m.name, m.description, a.alias, a.version
FROM registered_models m
LEFT JOIN registered_model_aliases a ON a.workspace = m.workspace AND a.name = m.name
WHERE m.workspace = 'default' AND {condition}
ORDER BY m.name"""

_NO_PROMPT = f"""NOT EXISTS (
    SELECT 1 FROM {{table}} p WHERE p.workspace = 'default' AND p.name = {{name}}
    AND p.key = '{PROMPT}' {{more}})"""
_TRUE = "AND p.value = 'true'"

_VERSIONS = """
SELECT v.version, v.creation_time, v.run_id, v.source, t.key, t.value
FROM model_versions v
LEFT JOIN model_version_tags t
    ON t.workspace = v.workspace AND t.name = v.name AND t.version = v.version
WHERE v.workspace = 'default' AND v.name = :name AND v.current_stage <> 'Deleted_Internal'
    AND {condition}
ORDER BY v.version"""

_EXPERIMENT = """
SELECT experiment_id, lifecycle_stage FROM experiments
WHERE workspace = 'default' AND name = :name"""

_RUNS = """
SELECT r.run_uuid, r.status, r.start_time, r.end_time, t.key, t.value
FROM runs r JOIN tags t ON t.run_uuid = r.run_uuid
WHERE r.run_uuid IN (
    SELECT r.run_uuid FROM runs r JOIN tags w ON w.run_uuid = r.run_uuid
    WHERE r.experiment_id = :experiment AND w.key = :tag AND {condition}
    ORDER BY {order} LIMIT :limit)
ORDER BY {order}"""

_ORDERS = {
    "start_time ASC": "r.start_time IS NULL, r.start_time, r.run_uuid",
    "start_time DESC": "r.start_time IS NULL, r.start_time DESC, r.run_uuid",
    "end_time DESC": "r.end_time IS NULL, r.end_time DESC, r.start_time DESC, r.run_uuid",
}

Ask = Callable[[str, Mapping[str, Any]], Iterable[Any]]
"""Sends a query with named parameters and returns its rows."""


@contextlib.contextmanager
def open_tables(
    uri: str, sqlite: Path | None, shown: str, wait_s: float
) -> Iterator[TableStore | None]:
    """Yield a store, or None if the revision of the tables is not one of `TESTED`.

    `sqlite`: the file of an SQLite URI, else None. `shown`: the URI without its password. `wait_s`:
    how long to wait for a lock on that file, in seconds. Raises NoRegistryError if there are no
    tables: MLflow's client would make them.
    """
    if sqlite is not None:
        address = f"file:{quote(str(sqlite))}?mode=rw"  # never creates it; it may be read-only
        connection = sqlite3.connect(address, uri=True, timeout=wait_s, isolation_level=None)
        with contextlib.closing(connection):
            yield _make_store(lambda query, values: connection.execute(query, dict(values)), shown)
        return
    from sqlalchemy import create_engine, text
    from sqlalchemy.pool import NullPool

    engine = create_engine(uri, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as postgres:
        yield _make_store(lambda query, values: postgres.execute(text(query), dict(values)), shown)


def _make_store(ask: Ask, shown: str) -> TableStore | None:
    """Return a store that reads the tables, or None if MLflow's client must read them.

    That is so if their revision is not one of `TESTED`, or if they hold several workspaces. Raises
    NoRegistryError if there are no tables.
    """
    try:
        revisions = {str(row[0]) for row in ask("SELECT version_num FROM alembic_version", {})}
    except Exception as error:
        if "alembic_version" not in str(error):  # else there is no such table
            raise
        raise NoRegistryError.at(shown, "it has no tables of MLflow") from None
    if not revisions or not revisions <= TESTED:
        return None
    # In a database with several workspaces, MLflow decides which rows a user may see.
    for table in ("registered_models", "experiments"):
        if list(ask(f"SELECT 1 FROM {table} WHERE workspace <> 'default' LIMIT 1", {})):
            return None
    return TableStore(ask)


def _group_pairs(rows: Iterable[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Group rows that differ only in their last two values, a key and its value.

    Yields what the rows of each group have in common, and a dictionary of their keys and values:
    `(1, "a", 2), (1, "b", 3)` gives `(1,), {"a": 2, "b": 3}`.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for *common, key, value in rows:
        pairs = groups.setdefault(tuple(common), {})
        if key is not None:  # None: the LEFT JOIN found no tag or alias
            pairs[key] = value
    yield from groups.items()


class TableStore:
    """A `Store` that sends SQL queries. `Store` says what the methods return."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def model(self, name: str) -> StoredModel | None:
        """Return the model of that name, or None, also if it is a prompt."""
        no_prompt = _NO_PROMPT.format(table="registered_model_tags", name=":name", more="")
        return next(iter(self._read_models(f"m.name = :name AND {no_prompt}", name=name)), None)

    def models(self) -> list[StoredModel]:
        """Return all models but prompts, whose tag PROMPT is `true`."""
        no_prompt = _NO_PROMPT.format(table="registered_model_tags", name="m.name", more=_TRUE)
        return self._read_models(no_prompt)

    def versions(self, name: str) -> list[StoredVersion]:
        """Return all versions of a model, in the order of their numbers."""
        no_prompt = _NO_PROMPT.format(table="model_version_tags", name=":name", more=_TRUE)
        return self._read_versions(no_prompt, name=name)

    def version(self, name: str, number: int) -> StoredVersion | None:
        """Return one version of a model; None also for that of a prompt, which has its tag."""
        versions = self._read_versions("v.version = :number", name=name, number=number)
        return next((version for version in versions if PROMPT not in version.tags), None)

    def experiment(self, name: str) -> StoredExperiment | None:
        """Return the experiment of that name, or None. A deleted one has another stage."""
        for number, stage in self._ask(_EXPERIMENT, {"name": name}):  # at most one row
            return StoredExperiment(str(number), stage == "active")
        return None

    def runs(self, query: RunQuery) -> list[StoredRun]:
        """Return the runs that `query` asks for: each part of it becomes a condition in SQL."""
        values: dict[str, Any] = {
            "experiment": int(query.experiment),
            "tag": query.tag,
            "limit": query.limit or _NO_LIMIT,
        }
        conditions = ["w.value IS NOT NULL"]
        if query.value:
            conditions = ["w.value = :value"]
            values["value"] = query.value
        if query.status is not None:
            conditions.append("r.status = :status")
            values["status"] = query.status
        if query.started is not None:
            conditions.append("r.start_time >= :since AND r.start_time < :before")
            values["since"], values["before"] = query.started
        sql = _RUNS.format(condition=" AND ".join(conditions), order=_ORDERS[query.order])
        return [
            StoredRun(run, status, start, end, tags)
            for (run, status, start, end), tags in _group_pairs(self._ask(sql, values))
        ]

    def _read_models(self, condition: str, **values: Any) -> list[StoredModel]:
        """Read the models for which the SQL `condition` holds. `values` are its parameters."""
        rows = self._ask(_MODELS.format(condition=condition), values)
        return [
            StoredModel(name, description or "", aliases)
            for (name, description), aliases in _group_pairs(rows)
        ]

    def _read_versions(self, condition: str, name: str, **values: Any) -> list[StoredVersion]:
        """Read the versions of a model for which the SQL `condition` holds."""
        rows = self._ask(_VERSIONS.format(condition=condition), {"name": name, **values})
        return [
            StoredVersion(name, number, created, run or "", str(source), tags)
            for (number, created, run, source), tags in _group_pairs(rows)
        ]
