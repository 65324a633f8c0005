"""Bundles without a compiler: random bytes as artifacts, and a manifest to match."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from registry.bundle.annex import Annex, AnnexRecord
from registry.bundle.bundle import Bundle
from registry.bundle.digests import seal
from registry.bundle.manifest import Manifest
from registry.promotion import Decision
from soa.files import digest_of
from soa.records import as_record

FAR = "rocm/gfx90a"
V3 = "cpu/x86-64-v3"
PASSED = (Decision("digests", True, "all match", "all match", "every file has its digest"),)
MakeBundle = Callable[..., Path]
"""`make_bundle(seed=0, **fields of the manifest)`: see tests/registry/conftest.py."""


def tree(folder: Path) -> dict[str, str]:
    """The digest of each file, by its path in the folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): digest_of(path) for path in files}


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


def provable(data: dict[str, Any]) -> dict[str, Any]:
    """The same manifest with a signature, for bundles whose reference is read."""
    from tests.models.building import mlp_signature

    return data | {"signature": mlp_signature(5000, (10, 1000)).to_dict()}


def write_reference(path: Path) -> None:
    """A reference of ten rows for the signature of a `provable` manifest."""
    import torch

    from stages.reference.answers import Reference
    from tests.models.building import mlp_signature

    draw = torch.Generator().manual_seed(0)
    columns = mlp_signature().inputs[0].block.columns
    inputs = {"jets": {name: torch.rand(5000, generator=draw) for name in columns}}
    outputs = {"probabilities": torch.rand(10, 3, generator=draw)}
    Reference(inputs, ({"n": 10},), (outputs,)).save(path)


def write_bundle(path: Path, manifest: Manifest, seed: int = 0) -> None:
    """Writes a sealed bundle. Equal arguments give equal bytes, another seed other weights."""
    content = random.Random(seed)
    for name in manifest.files():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content.randbytes(5000))
    if manifest.signature["outputs"]:
        write_reference(path / manifest.reference)
    (path / "manifest.json").write_text(manifest.to_json())
    (path / "reports").mkdir()
    (path / "reports/validation.json").write_text(json.dumps({"rows": [0, 1, 31]}))
    (path / "reports/benchmark.json").write_text(json.dumps({"calls": 100}))
    seal(path)


def made_bundle(path: Path, seed: int = 0) -> Bundle:
    """The bundle of `manifest_data`, written by `write_bundle`."""
    write_bundle(path, as_record(Manifest, manifest_data()), seed)
    return Bundle.open(path)


def write_annex(path: Path, bundle: Bundle, target: str, seed: int = 0, **fields: Any) -> Annex:
    """Writes a sealed annex with one candidate of its own; another seed gives other bytes."""
    library = f"annexes/{target}/aoti/model.so"
    candidates = {
        "aoti": {"status": "valid", "files": [library]},
        "exported": {"status": "valid", "files": ["program.pt2"]},
    }
    record = {
        "name": bundle.manifest.name,
        "base": bundle.digest,
        "target": target,
        "record": {"status": "verified", "chosen": "aoti", "candidates": candidates},
        "created": "2026-01-02T03:04:05+00:00",
        "by": f"builder {seed}",
        "python": "3.11.2",
    }
    (path / "aoti").mkdir(parents=True)
    (path / "aoti" / "model.so").write_bytes(random.Random(seed).randbytes(5000))
    (path / "reports").mkdir()
    for name in ("validation", "benchmark"):
        (path / f"reports/{name}.json").write_text(json.dumps({target: {"seed": seed}}))
    (path / "annex.json").write_text(as_record(AnnexRecord, record | fields).to_json())
    seal(path)
    return Annex.open(path)


def elsewhere() -> Manifest:
    """A version for a device that this host lacks: nothing is measured, so a promotion is quick."""
    data = provable(manifest_data())
    (record,) = data["targets"].values()
    for engine in record["candidates"].values():
        engine["files"] = [file.replace(V3, FAR) for file in engine.get("files", [])]
    data["targets"] = {FAR: {**record, "status": "unverified"}}
    return as_record(Manifest, data)
