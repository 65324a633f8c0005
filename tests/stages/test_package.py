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


CRASH = "killed by SIGSEGV"


def candidate(mlp: Built, engine_name: str, report: ValidationReport) -> Candidate:
    """A candidate with this report; only TorchScript's has a file of its own."""
    own = (mlp.files[engine_name].name,) if engine_name == "torchscript" else ()
    error = CRASH if engine_name == "aoti" else None
    compiled = Compiled(
        engine=engine_name,
        folder=mlp.files[engine_name].parent,
        files=own,
        seconds=1.5,
        outcome=Outcome(None, error, Path("log"), Path("script")),
        facts={"opset": 20, "of": [engine_name]},
    )
    return Candidate(compiled, report)


def result(mlp: Built, valid: bool) -> TargetResult:
    """Three candidates: one that did not compile, one refused, and one valid (or also refused)."""
    reports = {
        "aoti": ValidationReport.failed("aoti", CRASH),
        "torchscript": ValidationReport.refused("torchscript", "off by a mile"),
        "exported": ValidationReport.refused("exported", "off by two miles"),
    }
    timed = None
    if valid:
        session = mlp.session("exported")
        reference = Reference.load(mlp.capture.reference)
        reports["exported"] = validate_session(session, "exported", reference, TIGHT)
        timed = benchmark(mlp.signature, {"exported": session}, mlp.inputs, seconds=0.01)
    candidates = {name: candidate(mlp, name, report) for name, report in reports.items()}
    return TargetResult(TARGET, {}, candidates, timed)


def packaged(mlp: Built, dest: Path, valid: bool = True) -> Bundle:
    """The bundle of the three candidates."""
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
    """The bundle, whose program is valid."""
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
    assert record.candidates["aoti"].reason == CRASH
    reports = json.loads((bundle.path / "reports" / "validation.json").read_text())
    assert reports[TARGET]["torchscript"]["reason"] == "off by a mile"


def test_a_bundle_has_the_files_of_each_candidate(bundle: Bundle) -> None:
    candidates = bundle.manifest.targets[TARGET].candidates
    assert {name: candidate.files for name, candidate in candidates.items()} == {
        "aoti": [],
        "torchscript": [f"targets/{TARGET}/torchscript/model.ts"],
        "exported": ["program.pt2"],
    }
    assert candidates["torchscript"].facts == {"opset": 20, "of": ["torchscript"]}


def test_a_bundle_has_what_was_measured(bundle: Bundle) -> None:
    exported = bundle.manifest.targets[TARGET].candidates["exported"]
    assert set(exported.benchmark) == {"1", "10", "100", "1000", "4099", "5000"}
    assert exported.worst["probabilities"].max_abs < 1e-5


@pytest.mark.parametrize("name", ["torchscript", "exported"])
def test_an_artifact_of_a_bundle_has_the_answers_of_what_was_built(
    mlp: Built, bundle: Bundle, name: str
) -> None:
    file = bundle.file(bundle.manifest.targets[TARGET].candidates[name].files[0])
    packaged_session = Session(mlp.signature, engine(name).open(file, torch.device("cpu")))
    memory = []
    for session in (packaged_session, mlp.session(name)):
        inputs, outputs = mlp.collections({"n": 33})
        session.run(inputs, outputs)
        memory.append(outputs["tags"].memory()[0])
    assert torch.equal(*memory)


def test_a_version_without_a_valid_artifact_is_refused(mlp: Built, tmp_path: Path) -> None:
    with pytest.raises(StageError) as caught:
        packaged(mlp, tmp_path / "bundle", valid=False)
    message = str(caught.value)
    assert message.startswith("no artifact of 'jets' is valid: ")
    for reason in (f"aoti: {CRASH}", "torchscript: off by a mile", "exported: off by two"):
        assert f"{TARGET} {reason}" in message
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(mlp: Built, tmp_path: Path) -> None:
    packaged(mlp, tmp_path / "bundle")
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "bundle").rglob("*")}
    with pytest.raises(BundleError, match="bundle"):
        packaged(mlp, tmp_path / "bundle")
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "bundle").rglob("*")} == before
    assert [f.name for f in tmp_path.iterdir()] == ["bundle"]
