"""`pipeline registry cache`: lists what this host keeps, and makes room."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from registry.store.host_cache import cache_root
from registry.store.registry import Registry
from tests.models.bundles import write_annex
from tests.models.project import Built, cli, refusal


def test_list_and_make_room(empty: Registry, jets: Built, tmp_path: Path) -> None:
    assert cli("cache").stdout == f"0 in {cache_root()}, 0B of 20.0GB\n"
    assert not cache_root().exists()
    version = empty.register(jets.bundle)
    annex = write_annex(tmp_path / "annex", jets.bundle, "cuda/sm_90")
    opened = empty.open(empty.add_target(version, annex), in_place=False)
    os.utime(cache_root() / annex.digest, (1000, 1000))
    found = json.loads(cli("cache", "--json").stdout)
    assert [(e["digest"], e["name"], e["in_use"]) for e in found["entries"]] == [
        (annex.digest, "jets cuda/sm_90", True),
        (jets.bundle.digest, "jets", True),
    ]
    assert found["entries"][0]["used"].startswith("1970-01-01T00:16:40")
    first, second, total = cli("cache", "--prune").stdout.splitlines()
    assert first.startswith(annex.digest[:12]) and "1970-01-01 00:16:40" in first
    assert second.endswith("in use  jets")
    assert total.startswith(f"2 in {cache_root()}, ")
    del opened
    size = sum(path.stat().st_size for path in jets.bundle.path.rglob("*") if path.is_file())
    lines = cli("cache", "--max-size", f"{size / 1e3 + 0.1:.3f}kB").stdout.splitlines()
    assert lines[0].endswith("jets") and lines[1].startswith("removed 1, ")
    assert json.loads(cli("cache", "--prune", "--json").stdout)["removed"] == [jets.bundle.digest]
    assert cli("cache").stdout.startswith("0 in ")


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("cache", "--max-size", "20") == (
        "--max-size: found '20'; write a number and kB, MB, GB or TB"
    )
    monkeypatch.setenv("PIPELINE_CACHE_SIZE", "all")
    assert refusal("cache").startswith("PIPELINE_CACHE_SIZE: found 'all'")
    assert "give one of the two" in cli("cache", "--prune", "--max-size", "1GB", code=2).stderr
