"""Runs in tiles of rows give the same answers as whole runs; otherwise no tiles are used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipeline
from engines.errors import RunError
from engines.native.runner import NativeExecutable
from runtime.checked import Tolerance, default_tolerance
from runtime.session import in_tiles as in_tiles_of
from runtime.session.session import Session
from soa import Signature
from soa.memory import Collection, read_block
from stages.capture import rows_are_independent
from stages.judging.validate import Trial, validate_here, validate_session
from stages.reference.answers import Reference, make_cases, random_inputs
from stages.timing.tile_choice import fastest_tile, tiled, tiles_of
from tests.models import detector, mlps, project, rogues, served
from tests.models.building import Built, build, mlp_signature

MODELS: dict[str, tuple[type[nn.Module], Signature, bool]] = {
    "a perceptron": (mlps.PointwiseFirst, mlp_signature(), True),
    "every dtype": (served.Mixed, served.MIXED, True),
    "a softmax over rows": (served.Coupled, served.COUPLED, False),
    "only what came before": (served.Running, served.COUPLED, False),
    "scalars": (served.Event, served.EVENT, False),
}


@pytest.mark.parametrize("name", MODELS)
def test_whether_rows_may_share_a_run(name: str) -> None:
    model, signature, expected = MODELS[name]
    session = Session(signature, rogues.uncompiled(model(), signature))
    tolerances = {b.name: default_tolerance(b.plan.dtypes[0]) for b in signature.outputs}
    inputs = random_inputs(signature, 1, {})
    assert rows_are_independent(session, inputs, tolerances) is expected


def test_rows_that_see_each_other_are_refused_in_tiles(tmp_path: Path) -> None:
    made = build(served.Coupled(), served.COUPLED, tmp_path, ("exported",), route="none")
    limits = {b.name: Tolerance(1e-3, 1e-3) for b in served.COUPLED.outputs}
    file, reference = made.files["exported"], made.capture.reference
    trial = Trial("exported", file, served.COUPLED, reference, limits)
    assert validate_here(trial.to_dict())["valid"]
    refused = validate_here(replace(trial, tile=256).to_dict())
    assert not refused["valid"] and "see each other" in refused["reason"]


def in_tiles(mlp: Built, rows: int, threads: int = 1) -> Session:
    executable = NativeExecutable(mlp.files["aoti"], "cpu", instances=4)
    return Session(mlp.signature, in_tiles_of(executable, mlp.signature, rows, threads))


def answers(mlp: Built, session: Session, n: int) -> torch.Tensor:
    """The answers of a binding that ran on another n before."""
    given, written = mlp.collections({"n": n})
    binding = session.bind(given, written)
    binding(n // 2)
    binding(n)
    (output,) = mlp.signature.outputs
    return read_block(output, written["tags"])


@pytest.mark.parametrize("n", [0, 1, 256, 257, 511, 512, 513, 1000, 1025, 4097])
def test_every_row_has_its_answer_and_threads_change_no_bit(mlp: Built, n: int) -> None:
    expected = answers(mlp, in_tiles(mlp, 0), n)
    alone = answers(mlp, in_tiles(mlp, 256), n)
    torch.testing.assert_close(alone, expected, atol=1e-6, rtol=1e-5)
    for threads in (2, 3):
        assert torch.equal(answers(mlp, in_tiles(mlp, 256, threads), n), alone)


@pytest.mark.parametrize("engine", ["onnxruntime", "torchscript", "exported"])
def test_every_engine_runs_in_tiles(mlp: Built, engine: str) -> None:
    whole = mlp.session(engine)
    for n in (0, 1, 511, 512, 1025):
        expected = answers(mlp, whole, n)
        torch.testing.assert_close(answers(mlp, tiled(whole, 256), n), expected)
    reference = Reference.load(mlp.capture.reference, mlp.signature)
    tolerances = {b.name: default_tolerance("float32") for b in mlp.signature.outputs}
    report = validate_session(tiled(whole, 256), engine, reference, tolerances)
    assert report.valid, report.reason


def test_tiles_are_validated_as_a_whole_run_is(mlp: Built) -> None:
    """With poison around every column, and no byte written outside the rows of a tile."""
    reference = Reference.load(mlp.capture.reference, mlp.signature)
    assert any(case["n"] % 256 == 1 and case["n"] > 256 for case in reference.cases)
    tolerances = {b.name: default_tolerance("float32") for b in mlp.signature.outputs}
    report = validate_session(in_tiles(mlp, 256, 2), "aoti", reference, tolerances)
    assert report.valid, report.reason


def test_many_calls_in_tiles(mlp: Built) -> None:
    session = in_tiles(mlp, 256, 2)
    bound = []
    outputs: list[Collection] = []
    for n in (1, 300, 1025, 700):
        given, written = mlp.collections({"n": n})
        bound.append(session.bind(given, written))
        outputs.append(written["tags"])
    session.run_many(bound, threads=3)
    (output,) = mlp.signature.outputs
    for binding, tags in zip(bound, outputs, strict=True):
        expected = answers(mlp, in_tiles(mlp, 256), binding.rows["n"])
        assert torch.equal(read_block(output, tags), expected)


@pytest.mark.parametrize("kinds", ["", "n", "nm", "ccc", "xyz", "nmmm"])
def test_kinds_that_are_not_those_of_the_arguments(mlp: Built, kinds: str) -> None:
    executable = NativeExecutable(mlp.files["aoti"], "cpu").in_tiles(kinds, 256)
    with pytest.raises(RunError, match="kind"):
        Session(mlp.signature, executable).bind(*mlp.collections({"n": 3}))


def test_which_tiles_are_tried(mlp: Built) -> None:
    assert tiles_of(mlp_signature(127)) == ()
    assert tiles_of(mlp_signature(128)) == (64,)
    assert tiles_of(mlp.signature) == (64, 256, 1024)
    assert tiles_of(served.EVENT) == () and detector.signature().tile_kinds is None


def test_the_reference_has_more_rows_than_two_tiles(mlp: Built) -> None:
    assert {"n": 2049} in make_cases(mlp.signature)


def test_the_fastest_tile_is_one_of_those_tried(mlp: Built) -> None:
    for engine in ("aoti", "exported"):
        assert fastest_tile(mlp.session(engine), mlp.inputs) in (None, 64, 256, 1024)


def test_a_session_takes_the_tile_of_its_artifact(jets: project.Built, tmp_path: Path) -> None:
    def edit(engine: str) -> Any:
        def edited(_: Path, manifest: dict[str, Any]) -> None:
            record = manifest["targets"][project.TARGET]
            record["candidates"][engine]["tile"] = 256
            record["chosen"], record["below"] = engine, []

        return edited

    tiled = project.resealed(jets.bundle, tmp_path / "tiled", edit("aoti"))
    for threads in (1, 2):
        with_tiles = pipeline.load(tiled.path, mode="test", threads=threads)
        project.require_right(with_tiles, "aoti", n=601)
    other = project.resealed(jets.bundle, tmp_path / "other", edit("torchscript"))
    project.require_right(pipeline.load(other.path, mode="test"), "torchscript", n=601)
