"""Copies of registries: a copy is quicker than a new registry."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

from registry import Registry, Version

# The columns in which MLflow keeps paths of files.
_PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def copy(store: Path, folder: Path) -> None:
    """Copies a registry: its `registry.db` and its files.

    `folder` may exist, unless this process has written to the registry in it: MLflow keeps
    connections open.
    """
    shutil.copytree(store, folder, dirs_exist_ok=True)
    with contextlib.closing(sqlite3.connect(folder / "registry.db")) as database, database:
        for table, column in _PLACES:
            moved = f"{column} = replace({column}, ?, ?)"
            database.execute(f"UPDATE {table} SET {moved}", (str(store), str(folder)))


def file_of(registry: Registry) -> Path:
    """The SQLite file of a registry."""
    return Path(registry.uri.removeprefix("sqlite:///"))


def folder_of(version: Version) -> Path:
    """The folder of a version's bundle, in a store on this host."""
    return Path(version.source.removeprefix("file://"))
