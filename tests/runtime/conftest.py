"""Fixtures of tests that load versions: an own cache, and a registry with a promoted version."""

from __future__ import annotations

from pathlib import Path

import pytest

from registry.store.registry import Registry
from tests.models.project import Built
from tests.models.versions import promoted


@pytest.fixture(autouse=True)
def own_cache_of_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def registry(jets: Built, empty: Registry) -> Registry:
    """jets/1 is in production."""
    promoted(empty, jets.bundle)
    return empty
