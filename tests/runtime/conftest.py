from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from registry.store.registry import Registry


@pytest.fixture
def empty(tmp_path: Path, empty_database: Path) -> Registry:
    """A registry of this test's own, with nothing in it."""
    (tmp_path / "store").mkdir()
    shutil.copy(empty_database, tmp_path / "store" / "registry.db")
    return Registry(f"sqlite:///{tmp_path}/store/registry.db")
