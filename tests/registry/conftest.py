"""Bundles made by hand (random bytes for artifacts) and registries of their own for each test."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from registry import Bundle, Decision, Manifest, Registry, seal

V3 = "cpu/x86-64-v3"


@pytest.fixture
def manifest_data() -> dict[str, Any]:
    """A manifest as plain JSON data: one verified target with a valid and a failed candidate."""
    aoti = {
        "status": "valid",
        "files": [f"targets/{V3}/aoti/model.pt2", f"targets/{V3}/aoti/data/weights.bin"],
        "compile_seconds": 12.5,
        "worst": {"probabilities": {"max_abs": 2.5e-7, "max_rel": 1e-5, "outside": 0.0}},
        "benchmark": {
            "10": {"median_us": 11.5, "p05_us": 11.0, "p95_us": 13.0},
            "1000": {"median_us": 210.0, "p05_us": 200.0, "p95_us": 250.0},
        },
    }
    exported = {"status": "failed", "reason": "the compiler crashed | signal 11"}
    return {
        "schema_version": 1,
        "name": "jets",
        "description": "a small tagger",
        "signature": {"inputs": [], "outputs": []},
        "capture": {"program": "torch.export", "torchscript": "scripted"},
        "program": "program.pt2",
        "torchscript": "model.ts",
        "reference": "reference.safetensors",
        "targets": {
            V3: {
                "status": "verified",
                "chosen": "aoti",
                "candidates": {"aoti": aoti, "exported": exported},
            }
        },
        "tolerances": {"probabilities": {"atol": 1e-5, "rtol": 1e-4, "max_outside": 0.0}},
        "provenance": {
            "created": "2026-01-02T03:04:05+00:00",
            "git_commit": "0123abc",
            "git_dirty": True,
            "config_sha256": "00ff",
            "config": {"name": "jets"},
            "tools": {"torch": "2.13.0"},
            "host": {"cpu": "a fast one"},
            "python": "3.11.2",
        },
    }


@pytest.fixture
def manifest(manifest_data: dict[str, Any]) -> Manifest:
    return Manifest.model_validate(manifest_data)


@pytest.fixture
def make_bundle(tmp_path: Path, manifest_data: dict[str, Any]) -> Callable[..., Path]:
    """`make_bundle(seed=0, **fields of the manifest)`: the path of a sealed bundle folder.

    Equal arguments give equal bytes, another seed gives other weights.
    """
    made = 0

    def make(seed: int = 0, **fields: Any) -> Path:
        nonlocal made
        made += 1
        path = tmp_path / "bundles" / str(made)
        manifest = Manifest.model_validate(manifest_data | fields)
        content = random.Random(seed)
        for name in manifest.files():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content.randbytes(5000))
        (path / "manifest.json").write_text(manifest.to_json())
        (path / "reports").mkdir()
        (path / "reports/validation.json").write_text(json.dumps({"rows": [0, 1, 31]}))
        (path / "reports/benchmark.json").write_text(json.dumps({"calls": 100}))
        seal(path)
        return path

    return make


@pytest.fixture
def bundle(make_bundle: Callable[..., Path]) -> Bundle:
    return Bundle.open(make_bundle())


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow takes a second to make its tables; they are the same in every registry."""
    path = tmp_path_factory.mktemp("template") / "registry.db"
    with Registry(f"sqlite:///{path}")._access.client(write=True):
        pass
    return path


@pytest.fixture
def registry(tmp_path: Path, empty_database: Path) -> Registry:
    folder = tmp_path / "store"
    folder.mkdir()
    shutil.copy(empty_database, folder / "registry.db")
    return Registry(f"sqlite:///{folder}/registry.db")


@pytest.fixture
def passed() -> list[Decision]:
    return [Decision("digests", True, "all match", "all match", "every file has its digest")]


@pytest.fixture(autouse=True)
def own_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test works in a fresh folder, and none may leave MLflow's own defaults in it."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("PIPELINE_REGISTRY", "PIPELINE_ARTIFACTS", "PIPELINE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield folder
    assert {path.name for path in folder.iterdir()} <= {"pipeline-registry"}
