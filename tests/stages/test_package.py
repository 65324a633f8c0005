"""Packaging writes a complete version in one sealed folder, or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engines import Target, engine
from engines.processes import Outcome
from registry.bundle.bundle import Bundle
from registry.bundle.manifest import Provenance, SessionSettings
from registry.errors import BundleError
from runtime.checked import Tolerance
from runtime.session.session import Session
from stages.compile import Compiled
from stages.errors import StageError
from stages.judging.validate import validate_session
from stages.package import Candidate, TargetResult, package
from stages.reference.answers import Reference
from stages.reports import ValidationReport
from stages.timing.racing import benchmark
from tests.models.building import Built

TARGET = str(Target.parse("cpu"))
TIGHT = {"probabilities": Tolerance(1e-5, 1e-5)}
PROVENANCE = Provenance(
    created="2026-01-02T03:04:05+00:00",
    config_sha256="00ff",
    config={"name": "jets"},
    tools={"torch": torch.__version__},
    host={"cpu": "any"},
    python="3.11",
)


def result(mlp: Built, valid: bool) -> TargetResult:
    """Three candidates: one that did not compile, one refused, and one valid (or also refused)."""
    reference = Reference.load(mlp.capture.reference)
    compiled = {
        name: Compiled(
            engine=name,
            folder=mlp.files[name].parent,
            files=(mlp.files[name].name,) if name == "torchscript" else (),
            seconds=1.5,
            outcome=Outcome(
                None, "killed by SIGSEGV" if name == "aoti" else None, Path("log"), Path("script")
            ),
            facts={"opset": 20, "of": [name]},
        )
        for name in ("aoti", "torchscript", "exported")
    }
    reports = {
        "aoti": ValidationReport.failed("aoti", "killed by SIGSEGV"),
        "torchscript": ValidationReport.refused("torchscript", "off by a mile"),
        "exported": validate_session(mlp.session("exported"), "exported", reference, TIGHT)
        if valid
        else ValidationReport.refused("exported", "off by two miles"),
    }
    timed = (
        benchmark(mlp.signature, {"exported": mlp.session("exported")}, mlp.inputs, seconds=0.01)
        if valid
        else None
    )
    candidates = {name: Candidate(compiled[name], reports[name]) for name in compiled}
    return TargetResult(TARGET, {}, candidates, timed)


def packaged(mlp: Built, dest: Path, valid: bool = True) -> Bundle:
    return package(
        dest,
        "jets",
        "a small tagger",
        mlp.capture,
        {TARGET: result(mlp, valid)},
        TIGHT,
        frozenset({"probabilities"}),
        SessionSettings(threads=2, instances=5),
        PROVENANCE,
    )


@pytest.fixture(scope="module")
def bundle(mlp: Built, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return packaged(mlp, tmp_path_factory.mktemp("packaged") / "bundle")


def test_a_bundle_is_sealed(bundle: Bundle) -> None:
    assert (bundle.path / "SHA256SUMS").is_file()
    assert Bundle.open(bundle.path).digest == bundle.digest


def test_a_bundle_says_how_it_is_run(bundle: Bundle) -> None:
    assert bundle.manifest.session == SessionSettings(threads=2, instances=5)
    assert bundle.manifest.capture.torchscript == "scripted"


def test_a_bundle_has_the_verdict_on_each_candidate(bundle: Bundle) -> None:
    record = bundle.manifest.targets[TARGET]
    assert (record.status, record.chosen) == ("verified", "exported")
    assert {name: c.status for name, c in record.candidates.items()} == {
        "aoti": "failed",
        "torchscript": "refused",
        "exported": "valid",
    }
    assert record.candidates["aoti"].reason == "killed by SIGSEGV"
    reports = json.loads((bundle.path / "reports" / "validation.json").read_text())
    assert reports[TARGET]["torchscript"]["reason"] == "off by a mile"


def test_a_bundle_has_the_files_of_each_candidate(bundle: Bundle) -> None:
    candidates = bundle.manifest.targets[TARGET].candidates
    assert {name: each.files for name, each in candidates.items()} == {
        "aoti": [],
        "torchscript": [f"targets/{TARGET}/torchscript/model.ts"],
        "exported": ["program.pt2"],
    }
    assert candidates["torchscript"].facts == {"opset": 20, "of": ["torchscript"]}


def test_a_bundle_has_what_was_measured(bundle: Bundle) -> None:
    exported = bundle.manifest.targets[TARGET].candidates["exported"]
    assert set(exported.benchmark) == {"1", "10", "100", "1000", "4099", "5000"}
    assert exported.worst["probabilities"].max_abs < 1e-5


def test_what_it_holds_runs(mlp: Built, bundle: Bundle) -> None:
    for name in ("torchscript", "exported"):
        file = bundle.file(bundle.manifest.targets[TARGET].candidates[name].files[0])
        executable = engine(name).open(file, torch.device("cpu"))
        given, written = mlp.collections({"n": 33})
        Session(mlp.signature, executable).run(given, written)
        expected, wanted = mlp.collections({"n": 33})
        mlp.session(name).run(expected, wanted)
        assert torch.equal(written["tags"].memory()[0], wanted["tags"].memory()[0])


def test_a_version_without_a_valid_artifact_is_refused(mlp: Built, tmp_path: Path) -> None:
    with pytest.raises(StageError) as caught:
        packaged(mlp, tmp_path / "bundle", valid=False)
    message = str(caught.value)
    assert message.startswith("no artifact of 'jets' is valid: ")
    for part in ("aoti: killed by SIGSEGV", "torchscript: off by a mile", "exported: off by two"):
        assert f"{TARGET} {part}" in message
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(mlp: Built, tmp_path: Path) -> None:
    packaged(mlp, tmp_path / "bundle")
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "bundle").rglob("*")}
    with pytest.raises(BundleError, match="bundle"):
        packaged(mlp, tmp_path / "bundle")
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "bundle").rglob("*")} == before
    assert [f.name for f in tmp_path.iterdir()] == ["bundle"]
