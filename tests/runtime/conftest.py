from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from registry.store.registry import Registry
from tests.models.project import Built
from tests.models.versions import promoted


@pytest.fixture(autouse=True)
def as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives each test its own cache, and restores torch's number of threads."""
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def empty(tmp_path: Path, empty_database: Path) -> Registry:
    """An empty registry for this test."""
    (tmp_path / "store").mkdir()
    shutil.copy(empty_database, tmp_path / "store" / "registry.db")
    return Registry(f"sqlite:///{tmp_path}/store/registry.db")


@pytest.fixture
def registry(jets: Built, empty: Registry) -> Registry:
    """jets/1 is in production."""
    promoted(empty, jets.bundle)
    return empty


@pytest.fixture
def restless() -> Iterator[None]:
    """Makes Python switch threads after a few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
