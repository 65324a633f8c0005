from __future__ import annotations

import pytest

from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from tests.models import served
from tests.models.building import mlp_signature
from tests.models.mlps import PointwiseFirst
from tests.models.versions import promoted


@pytest.fixture(scope="session")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """For at most 64 rows a call: every batch takes several."""
    return served.shared(tmp_path_factory, "tagger", PointwiseFirst(1), mlp_signature(64))


@pytest.fixture
def production(empty: Registry, tagger: Bundle) -> Registry:
    """A registry with tagger/1 in production."""
    promoted(empty, tagger)
    return empty
