"""Recorded lookups of a name: the newer one counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from registry import Bundle, Registry
from registry.store import Lookup, LookupCache

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)


def test_an_older_answer_replaces_no_newer_one(
    registry: Registry, bundle: Bundle, tmp_path: Path
) -> None:
    """If two processes ask at the same time, the one that asked first may write last."""
    version, records = registry.register(bundle), LookupCache(tmp_path, "a registry", "production")
    for asked_at, newest in ((0, 0), (2, 2), (1, 2), (3, 3)):
        records.write("jets@production", Lookup(version, {}, NOW + timedelta(seconds=asked_at)))
        recorded = records.read("jets@production")
        assert recorded is not None
        assert recorded.at == NOW + timedelta(seconds=newest)


@pytest.mark.parametrize(("uri", "mode"), [("a registry", "test"), ("another", "production")])
def test_a_record_is_of_one_registry_and_mode(
    registry: Registry, bundle: Bundle, tmp_path: Path, uri: str, mode: str
) -> None:
    lookup = Lookup(registry.register(bundle), {}, NOW)
    LookupCache(tmp_path, "a registry", "production").write("jets@production", lookup)
    assert LookupCache(tmp_path, uri, mode).read("jets@production") is None
