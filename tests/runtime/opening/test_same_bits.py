"""The bits of a version: those it records, those that a host computes, and the gate."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.processes import run_isolated
from pipeline.loading import load
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from runtime.opening import Opening, answer_bits, open_artifact, open_version
from runtime.session import Session
from stages.errors import NotMeasuredError
from stages.judging.reproducing import PROCESSORS, reproduce
from tests.models.project import TARGET, Built, answer, cli, resealed

OTHER = "0" * 64


@pytest.fixture
def bits(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "bits-notes"


@pytest.fixture(autouse=True)
def no_qemu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch under qemu takes minutes; test_runtime_wheel.py does without."""
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def elsewhere(jets: Built, tmp_path: Path) -> Bundle:
    """The same version with other bits recorded, as from another host."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        for candidate in manifest["targets"][TARGET]["candidates"].values():
            candidate["bits"] = OTHER

    return resealed(jets.bundle, tmp_path / "elsewhere", edit)


def test_a_host_that_gives_the_same_says_nothing(
    jets: Built, bits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(jets.bundle.path, mode="test").close()
    [note] = bits.iterdir()
    record = jets.bundle.manifest.targets[TARGET]
    assert json.loads(note.read_text()) == record.candidates[str(record.chosen)].bits
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_host_that_gives_others_says_so_at_every_load(
    elsewhere: Bundle, bits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for times in (1, 2):
        load(elsewhere.path, mode="test").close()
        said = [r.getMessage() for r in caplog.records if "gives other bits" in r.getMessage()]
        assert len(said) == times and "jets" in said[0] and TARGET in said[0]
        assert len(list(bits.iterdir())) == 1  # the second load reads the record of the first


def test_a_cache_that_cannot_be_written(
    jets: Built, bits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bits.parent.write_text("a file")
    load(jets.bundle.path, mode="test").close()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_an_older_version_has_none(
    jets: Built, tmp_path: Path, bits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        for candidate in manifest["targets"][TARGET]["candidates"].values():
            del candidate["bits"]

    load(resealed(jets.bundle, tmp_path / "old", edit).path, mode="test").close()
    assert not bits.exists()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_validate_says_which_artifacts_give_other_bits(jets: Built, tmp_path: Path) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["targets"][TARGET]["candidates"]["exported"]["bits"] = OTHER

    edited = resealed(jets.bundle, tmp_path / "edited", edit)
    said = cli("validate", edited.path).stdout
    assert f"torchscript on {TARGET}: the same bits as where it was built" in said
    assert f"exported on {TARGET}: other bits than where it was built" in said


def test_threads_tiles_and_other_processors(jets: Built, tmp_path: Path) -> None:
    opened = open_version(Opening(jets.bundle.path, mode="test"))
    found = {each.how: each for each in reproduce(opened, TARGET, "exported", tmp_path)}
    assert found["here"].digest == found["where it was built"].digest
    whole = [found[f"with {threads} threads"].digest for threads in (1, 2, 3)]
    assert None not in whole and found["here"].digest not in whole
    for processor in PROCESSORS:
        one = found[f"on qemu's {processor}"]
        assert (one.digest, one.why) == (None, "qemu-x86_64 is not installed")


def test_a_processor_for_which_memory_ran_out_is_not_judged(
    jets: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qemu = tmp_path / "qemu-x86_64"
    qemu.write_text("#!/bin/sh\nkill -s KILL $$\n")
    qemu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    opened = open_version(Opening(jets.bundle.path, mode="test"))
    with pytest.raises(NotMeasuredError, match="memory"):
        list(reproduce(opened, TARGET, "exported", tmp_path / "scratch"))


def test_the_digest_is_of_what_a_host_runs(jets: Built) -> None:
    """An artifact with tiles runs in tiles here: torch's products may depend on them."""
    opened = open_version(Opening(jets.bundle.path, mode="test"))
    reference = jets.bundle.file(jets.bundle.manifest.reference)
    for name, candidate in jets.bundle.manifest.targets[TARGET].candidates.items():
        executable = open_artifact(opened, TARGET, name, torch.device("cpu"))
        found = answer_bits(Session(opened.signature, executable), reference)
        assert found == candidate.bits, (name, candidate.tile)


def test_the_gate(jets: Built, tmp_path: Path) -> None:
    registry = Registry(f"sqlite:///{tmp_path}/registry.db")
    asked = tmp_path / "policy.yaml"
    asked.write_text("reproducible: true\n")
    ref = registry.register(jets.bundle).ref
    asking = ("--to", "staging", "--policy", asked, "--dry-run")
    chosen = str(jets.bundle.manifest.targets[TARGET].chosen)
    opened = open_version(Opening(jets.bundle.path, mode="test"))
    ways: dict[bool, set[str | None]] = {}
    for each in reproduce(opened, TARGET, chosen, tmp_path):
        ways.setdefault(each.every, set()).update({each.digest} - {None})
    # torch's products may depend on tiles.
    same = all(len(digests) == 1 for digests in ways.values())
    found = answer("promote", ref, *asking, registry=registry, code=0 if same else 1)
    (decision,) = [d for d in found["decisions"] if d["gate"] == "reproducible"]
    assert "not measured on qemu's Haswell" in decision["detail"]
    assert decision["passed"] == same, decision


def test_two_threads_in_the_child_of_a_process_that_imported_the_native_runner(
    bare_jets: Built, tmp_path: Path
) -> None:
    bundle = bare_jets.bundle
    payload = {
        "engine": "aoti",
        "file": str(bundle.file(bundle.manifest.targets[TARGET].candidates["aoti"].files[0])),
        "signature": bundle.manifest.signature,
        "reference": str(bundle.file(bundle.manifest.reference)),
        "tile": 0,
    }
    imports = ("torch", "engines.native.runner")
    ran = run_isolated("stages.judging.reproducing:bits_here", payload, tmp_path, 600, imports)
    assert ran.ok, ran.error
    seen = {way["how"] for way in ran.value if way["digest"]}
    assert seen >= {"with 2 threads", "with 3 threads"}


def test_a_child_gives_the_same_from_plain_data(bare_jets: Built) -> None:
    """`python -m runtime.opening.same_bits` in a child, as it is run under qemu."""
    bundle = bare_jets.bundle
    candidate = bundle.manifest.targets[TARGET].candidates["lanes"]
    job = {
        "engine": "lanes",
        "file": str(bundle.file(candidate.files[0])),
        "signature": bundle.manifest.signature,
        "reference": str(bundle.file(bundle.manifest.reference)),
    }
    done = subprocess.run(
        [sys.executable, "-m", "runtime.opening.same_bits"], input=json.dumps(job),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == candidate.bits
