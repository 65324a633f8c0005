"""Registries that are made once and copied, which is quicker than making each of them."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

# Where MLflow writes down in which folder files are.
_PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def copy(store: Path, folder: Path) -> None:
    """Copy a registry, its `registry.db` and its files. `folder` may be there already, unless this
    process has written to its registry: MLflow keeps connections open."""
    shutil.copytree(store, folder, dirs_exist_ok=True)
    with contextlib.closing(sqlite3.connect(folder / "registry.db")) as database, database:
        for table, column in _PLACES:
            moved = f"{column} = replace({column}, ?, ?)"
            database.execute(f"UPDATE {table} SET {moved}", (str(store), str(folder)))
