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
from registry.promotion import Bits
from registry.store.registry import Registry
from runtime.opening import Opening, digest_answers, open_artifact, open_version
from runtime.session import Session
from stages.errors import NotMeasuredError
from stages.judging.reproducing import PROCESSORS, reproduce
from tests.models.project import TARGET, Built, answer, cli, resealed

OTHER = "0" * 64


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """The folder of the digests that this host has computed, which is not there yet."""
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


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_host_that_gives_the_recorded_bits_says_nothing(
    jets: Built, notes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(jets.bundle.path, mode="test").close()
    (note,) = notes.iterdir()
    record = jets.bundle.manifest.targets[TARGET]
    assert json.loads(note.read_text()) == record.candidates[str(record.chosen)].bits
    assert warnings(caplog) == []


def test_a_host_that_gives_other_bits_says_so_at_every_load(
    elsewhere: Bundle, notes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for times in (1, 2):
        load(elsewhere.path, mode="test").close()
        messages = [text for text in warnings(caplog) if "gives other bits" in text]
        assert len(messages) == times
        assert "jets" in messages[0]
        assert TARGET in messages[0]
        assert len(list(notes.iterdir())) == 1  # the second load reads the note of the first


def test_a_host_whose_cache_cannot_be_written_says_nothing(
    jets: Built, notes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notes.parent.write_text("a file")
    load(jets.bundle.path, mode="test").close()
    assert warnings(caplog) == []


def test_for_an_older_version_without_bits_none_are_computed(
    jets: Built, tmp_path: Path, notes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        for candidate in manifest["targets"][TARGET]["candidates"].values():
            del candidate["bits"]

    load(resealed(jets.bundle, tmp_path / "old", edit).path, mode="test").close()
    assert not notes.exists()
    assert warnings(caplog) == []


def test_validate_says_which_artifacts_give_other_bits(jets: Built, tmp_path: Path) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["targets"][TARGET]["candidates"]["exported"]["bits"] = OTHER

    edited = resealed(jets.bundle, tmp_path / "edited", edit)
    output = cli("validate", edited.path).stdout
    assert f"torchscript on {TARGET}: the same bits as where it was built" in output
    assert f"exported on {TARGET}: other bits than where it was built" in output


@pytest.fixture(scope="module")
def by_way(jets: Built, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bits]:
    """The bits of the exported artifact in each way of running it, on a host without qemu."""
    opened = open_version(Opening(jets.bundle.path, mode="test"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        ways = reproduce(opened, TARGET, "exported", tmp_path_factory.mktemp("bits"))
        return {bits.how: bits for bits in ways}


def test_an_artifact_has_the_bits_of_where_it_was_built(by_way: dict[str, Bits]) -> None:
    assert by_way["here"].digest == by_way["where it was built"].digest


def test_an_artifact_is_run_with_several_threads(by_way: dict[str, Bits]) -> None:
    """On a few rows of its own, so the digests are not those of all cases."""
    digests = [by_way[f"with {threads} threads"].digest for threads in (1, 2, 3)]
    assert None not in digests
    assert by_way["here"].digest not in digests


@pytest.mark.parametrize("processor", PROCESSORS)
def test_without_qemu_no_other_processor_is_measured(
    by_way: dict[str, Bits], processor: str
) -> None:
    bits = by_way[f"on qemu's {processor}"]
    assert (bits.digest, bits.why) == (None, "qemu-x86_64 is not installed")


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


def test_the_recorded_bits_are_of_the_artifact_as_a_host_runs_it(jets: Built) -> None:
    """An artifact with tiles runs in tiles here: torch's products may depend on them."""
    opened = open_version(Opening(jets.bundle.path, mode="test"))
    reference = jets.bundle.file(jets.bundle.manifest.reference)
    for name, candidate in jets.bundle.manifest.targets[TARGET].candidates.items():
        executable = open_artifact(opened, TARGET, name, torch.device("cpu"))
        bits = digest_answers(Session(opened.signature, executable), reference)
        assert bits == candidate.bits, (name, candidate.tile)


def test_a_promotion_passes_if_all_ways_give_the_same_bits(jets: Built, tmp_path: Path) -> None:
    registry = Registry(f"sqlite:///{tmp_path}/registry.db")
    policy = tmp_path / "policy.yaml"
    policy.write_text("reproducible: true\n")
    ref = registry.register(jets.bundle).ref
    options = ("--to", "staging", "--policy", policy, "--dry-run")
    chosen = str(jets.bundle.manifest.targets[TARGET].chosen)
    opened = open_version(Opening(jets.bundle.path, mode="test"))
    # The digests of all cases, and those of a few rows. On this host they may differ: torch's
    # products may depend on tiles.
    digests: dict[bool, set[str]] = {}
    for bits in reproduce(opened, TARGET, chosen, tmp_path):
        group = digests.setdefault(bits.every, set())
        if bits.digest is not None:
            group.add(bits.digest)
    same = all(len(group) == 1 for group in digests.values())
    answered = answer("promote", ref, *options, registry=registry, code=0 if same else 1)
    (decision,) = (item for item in answered["decisions"] if item["gate"] == "reproducible")
    assert "not measured on qemu's Haswell" in decision["detail"]
    assert decision["passed"] == same, decision


def test_a_child_measures_with_several_threads_after_the_runner_was_imported(
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
    result = run_isolated("stages.judging.reproducing:bits_here", payload, tmp_path, 600, imports)
    assert result.ok, result.error
    measured = {way["how"] for way in result.value if way["digest"]}
    assert measured >= {"with 2 threads", "with 3 threads"}


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
    process = subprocess.run(
        [sys.executable, "-m", "runtime.opening.same_bits"], input=json.dumps(job),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert process.stdout.strip() == candidate.bits
