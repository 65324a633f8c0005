"""Lookups on a real MLflow server, which is then stopped."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
import torch

from pipeline.loading import load
from registry.errors import RegistryUnavailableError
from registry.store.host_cache import Cache, cache_root
from registry.store.registry import Registry
from runtime.errors import LoadError
from tests.models.mlflow_server import served_here
from tests.models.project import Built
from tests.models.versions import negated, promoted

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flask") is None, reason="the server comes with the mlflow extra"
)


def test_versions_are_served_after_their_server_has_stopped(
    jets: Built,
    tmp_path: Path,
    empty_database: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # No writer dies here, and the machine may be busy.
    monkeypatch.setattr("registry.history.lock.LEASE_S", 600.0)
    with served_here(tmp_path, empty_database) as uri:
        registry = Registry(uri)
        promoted(registry, jets.bundle)
        first = load("jets@production", registry=registry)
        assert [entry.digest for entry in Cache(cache_root()).entries()] == [jets.bundle.digest]
        live = load("jets@production", live=True, registry=registry, lookup="prefer-cache")
        promoted(registry, negated(jets.bundle, tmp_path / "second"))
        assert live.refresh()
        load("jets/1", registry=registry)

    with pytest.raises(RegistryUnavailableError, match="no answer from the server"):
        load("jets@production", registry=registry)
    with caplog.at_level(logging.WARNING, "soa-pipeline"):
        stale = load("jets@production", registry=registry, lookup="prefer-cache", max_age_s=0)
        assert live.refresh() is False
    assert caplog.text.count("the registry cannot be asked, so jets/2 is served") == 2
    for session in (stale, load("jets@production", registry=registry, lookup="offline")):
        assert session.origin is not None
        assert session.origin.version == "2"
    old = load("jets/1", registry=registry, lookup="offline")
    inputs = first.collection("jets", 9)
    tags, expected = first.collection("tags", 9), first.collection("tags", 9)
    first.run(inputs, expected)
    old.run(inputs, tags)
    assert torch.equal(tags.memory()[0], expected.memory()[0])

    del first, live, stale, session, old
    assert len(Cache(cache_root()).shrink(0)) == 2
    with pytest.raises(RegistryUnavailableError, match="no answer from the server"):
        load("jets/1", registry=registry, lookup="prefer-cache")
    with pytest.raises(LoadError, match="is not in the cache"):
        load("jets/1", registry=registry, lookup="offline")
