"""Recorded lookups of a name: the newer one counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from registry import Bundle, Registry
from registry.store import Lookup, LookupCache

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)


def test_an_older_answer_replaces_no_newer_one(
    registry: Registry, bundle: Bundle, tmp_path: Path
) -> None:
    """If two processes ask at the same time, the one that asked first may write last."""
    version, records = registry.register(bundle), LookupCache(tmp_path, "a registry", "production")
    for at, expected in ((0, 0), (2, 2), (1, 2), (3, 3)):
        records.write("jets@production", Lookup(version, {}, NOW + timedelta(seconds=at)))
        found = records.read("jets@production")
        assert found is not None and found.at == NOW + timedelta(seconds=expected)
    for other in (
        LookupCache(tmp_path, "a registry", "test"),
        LookupCache(tmp_path, "another", "production"),
    ):
        assert other.read("jets@production") is None
