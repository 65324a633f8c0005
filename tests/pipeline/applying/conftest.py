from __future__ import annotations

from pathlib import Path

import pytest

from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from tests.models import served
from tests.models.building import mlp_signature
from tests.models.mlps import PointwiseFirst
from tests.models.versions import copy_of, promoted, store_of


@pytest.fixture(scope="session")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A version for at most 64 rows per call, so every batch takes several calls."""
    return served.shared(tmp_path_factory, "tagger", PointwiseFirst(1), mlp_signature(64))


@pytest.fixture(scope="session")
def store_of_tagger(
    tagger: Bundle, empty_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of `production`, made once for all tests."""
    return store_of(tmp_path_factory, empty_database, lambda registry: promoted(registry, tagger))


@pytest.fixture
def production(store_of_tagger: Path, tmp_path: Path) -> Registry:
    """A registry with tagger/1 in production."""
    return copy_of(store_of_tagger, tmp_path / "store")
