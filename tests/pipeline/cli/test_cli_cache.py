"""`pipeline registry cache`: lists what this host keeps, and makes room."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from registry.bundle.bundle import Bundle
from registry.store.host_cache import cache_root
from registry.store.registry import Registry
from tests.models.bundles import write_annex
from tests.models.project import Built, cli, refusal


def test_a_cache_that_is_empty_is_not_made() -> None:
    assert cli("cache").stdout == f"0 in {cache_root()}, 0B of 20.0GB\n"
    assert not cache_root().exists()


@pytest.fixture
def annex(empty: Registry, jets: Built, tmp_path: Path) -> str:
    """The digest of an annex of jets/1. It and the bundle are in the cache, and not in use."""
    version = empty.register(jets.bundle)
    written = write_annex(tmp_path / "annex", jets.bundle, "cuda/sm_90")
    empty.open(empty.add_target(version, written), in_place=False)
    os.utime(cache_root() / written.digest, (1000, 1000))
    return written.digest


@pytest.fixture
def opened(empty: Registry, annex: str) -> Bundle:
    """jets/1, which is in use with its annex; the annex was used last in 1970."""
    bundle = empty.open(empty.find("jets/1"), in_place=False)
    os.utime(cache_root() / annex, (1000, 1000))
    return bundle


def test_the_cache_is_listed_by_last_use(jets: Built, annex: str, opened: Bundle) -> None:
    entries = json.loads(cli("cache", "--json").stdout)["entries"]
    assert [(entry["digest"], entry["name"], entry["in_use"]) for entry in entries] == [
        (annex, "jets cuda/sm_90", True),
        (jets.bundle.digest, "jets", True),
    ]
    assert entries[0]["used"].startswith("1970-01-01T00:16:40")


def test_what_is_in_use_is_not_removed(annex: str, opened: Bundle) -> None:
    first, second, total = cli("cache", "--prune").stdout.splitlines()
    assert first.startswith(annex[:12]) and "1970-01-01 00:16:40" in first
    assert second.endswith("in use  jets")
    assert total.startswith(f"2 in {cache_root()}, ")


def test_room_is_made_by_removing_what_was_used_longest_ago(jets: Built, annex: str) -> None:
    files = [path for path in jets.bundle.path.rglob("*") if path.is_file()]
    kilobytes = sum(path.stat().st_size for path in files) / 1e3 + 0.1  # of the bundle alone
    lines = cli("cache", "--max-size", f"{kilobytes:.3f}kB").stdout.splitlines()
    assert lines[0].endswith("jets") and lines[1].startswith("removed 1, ")


def test_prune_removes_all_that_is_not_in_use(jets: Built, annex: str) -> None:
    removed = json.loads(cli("cache", "--prune", "--json").stdout)["removed"]
    assert sorted(removed) == sorted([annex, jets.bundle.digest])
    assert cli("cache").stdout.startswith("0 in ")


def test_a_size_without_a_unit_is_refused() -> None:
    assert refusal("cache", "--max-size", "20") == (
        "--max-size: found '20'; write a number and kB, MB, GB or TB"
    )


def test_a_size_in_the_environment_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_CACHE_SIZE", "all")
    assert refusal("cache").startswith("PIPELINE_CACHE_SIZE: found 'all'")


def test_prune_and_a_size_are_not_both_taken() -> None:
    assert "give one of the two" in cli("cache", "--prune", "--max-size", "1GB", code=2).stderr
