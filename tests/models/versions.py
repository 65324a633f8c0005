"""Versions of one model whose answers differ, made without compiling: other weights, same code."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from registry.version import Version
from tests.models.project import PASSED, resealed


def negated(bundle: Bundle, folder: Path) -> Bundle:
    """The `aoti` artifact runs on the weights with the opposite sign."""

    def edit(copy: Path, _: dict[str, Any]) -> None:
        (weights,) = copy.glob("targets/*/*/aoti/weights.bin")
        content = np.frombuffer(weights.read_bytes(), np.float32)
        weights.write_bytes((-content).tobytes())

    return resealed(bundle, folder, edit)


def store_of(
    factory: pytest.TempPathFactory, database: Path, fill: Callable[[Registry], object]
) -> Path:
    """A folder with a registry that `fill` has filled, for `copy_of`."""
    folder = factory.mktemp("store")
    shutil.copy(database, folder / "registry.db")
    fill(Registry(f"sqlite:///{folder}/registry.db"))
    return folder


def copy_of(store: Path, folder: Path) -> Registry:
    """The registry in `store` in a folder of its own, with its files: to change and to spoil. To
    register and promote its versions again would take ten times as long."""
    shutil.copytree(store, folder)
    with contextlib.closing(sqlite3.connect(folder / "registry.db")) as database, database:
        for table, column in (
            ("experiments", "artifact_location"),
            ("runs", "artifact_uri"),
            ("model_versions", "source"),
            ("model_versions", "storage_location"),
        ):
            moved = f"UPDATE {table} SET {column} = replace({column}, ?, ?)"
            database.execute(moved, (store.as_uri(), folder.as_uri()))
    return Registry(f"sqlite:///{folder}/registry.db")


def promoted(registry: Registry, bundle: Bundle) -> Version:
    return registry.promote(registry.register(bundle), "production", PASSED)
