from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from registry.store import Registry


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow takes a second to make its tables; they are the same in every registry."""
    path = tmp_path_factory.mktemp("template") / "registry.db"
    with Registry(f"sqlite:///{path}")._access.client(write=True):
        pass
    return path


@pytest.fixture
def empty(tmp_path: Path, empty_database: Path) -> Registry:
    """A registry of this test's own, with nothing in it."""
    (tmp_path / "store").mkdir()
    shutil.copy(empty_database, tmp_path / "store" / "registry.db")
    return Registry(f"sqlite:///{tmp_path}/store/registry.db")
