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
from soa.memory import read_block
from stages.capture import rows_are_independent
from stages.judging.validate import Trial, validate_here, validate_session
from stages.reference.answers import Reference, make_cases, random_inputs
from stages.reports import ValidationReport
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
    built = build(served.Coupled(), served.COUPLED, tmp_path, ("exported",), route="none")
    limits = {b.name: Tolerance(1e-3, 1e-3) for b in served.COUPLED.outputs}
    file, reference = built.files["exported"], built.capture.reference
    trial = Trial("exported", file, served.COUPLED, reference, limits)
    assert validate_here(trial.to_dict())["valid"]
    refused = validate_here(replace(trial, tile=256).to_dict())
    assert not refused["valid"] and "see each other" in refused["reason"]


def in_tiles(mlp: Built, rows: int, threads: int = 1) -> Session:
    """A session of aoti's library in tiles of so many rows; 0 is as a whole."""
    executable = NativeExecutable(mlp.files["aoti"], "cpu", instances=4)
    return Session(mlp.signature, in_tiles_of(executable, mlp.signature, rows, threads))


def answers(mlp: Built, session: Session, n: int) -> torch.Tensor:
    """The answers of a binding that ran on another n before."""
    inputs, outputs = mlp.collections({"n": n})
    binding = session.bind(inputs, outputs)
    binding(n // 2)
    binding(n)
    (output,) = mlp.signature.outputs
    return read_block(output, outputs["tags"])


@pytest.mark.parametrize("n", [0, 1, 256, 257, 511, 512, 513, 1000, 1025, 4097])
def test_every_row_has_its_answer_and_threads_change_no_bit(mlp: Built, n: int) -> None:
    expected = answers(mlp, in_tiles(mlp, 0), n)
    alone = answers(mlp, in_tiles(mlp, 256), n)
    torch.testing.assert_close(alone, expected, atol=1e-6, rtol=1e-5)
    for threads in (2, 3):
        assert torch.equal(answers(mlp, in_tiles(mlp, 256, threads), n), alone)


portable_engine = pytest.mark.parametrize("engine", ["onnxruntime", "torchscript", "exported"])


@portable_engine
def test_every_engine_runs_in_tiles(mlp: Built, engine: str) -> None:
    whole = mlp.session(engine)
    for n in (0, 1, 511, 512, 1025):
        expected = answers(mlp, whole, n)
        torch.testing.assert_close(answers(mlp, tiled(whole, 256), n), expected)


def validity(mlp: Built, session: Session, engine: str) -> ValidationReport:
    """The report on a session with the tolerances of float32."""
    reference = Reference.load(mlp.capture.reference, mlp.signature)
    tolerances = {block.name: default_tolerance("float32") for block in mlp.signature.outputs}
    return validate_session(session, engine, reference, tolerances)


@portable_engine
def test_tiles_of_every_engine_are_valid(mlp: Built, engine: str) -> None:
    report = validity(mlp, tiled(mlp.session(engine), 256), engine)
    assert report.valid, report.reason


def test_tiles_are_validated_as_a_whole_run_is(mlp: Built) -> None:
    """With poison around every column, and no byte written outside the rows of a tile."""
    reference = Reference.load(mlp.capture.reference, mlp.signature)
    assert any(case["n"] % 256 == 1 and case["n"] > 256 for case in reference.cases)
    report = validity(mlp, in_tiles(mlp, 256, 2), "aoti")
    assert report.valid, report.reason


def test_many_calls_in_tiles_have_the_bits_of_single_ones(mlp: Built) -> None:
    session = in_tiles(mlp, 256, 2)
    collections = [mlp.collections({"n": n}) for n in (1, 300, 1025, 700)]
    bindings = [session.bind(inputs, outputs) for inputs, outputs in collections]
    session.run_many(bindings, threads=3)
    (block,) = mlp.signature.outputs
    for binding, (_, outputs) in zip(bindings, collections, strict=True):
        expected = answers(mlp, in_tiles(mlp, 256), binding.rows["n"])
        assert torch.equal(read_block(block, outputs["tags"]), expected)


@pytest.mark.parametrize("kinds", ["", "n", "nm", "ccc", "xyz", "nmmm"])
def test_kinds_that_are_not_those_of_the_arguments_are_refused(mlp: Built, kinds: str) -> None:
    executable = NativeExecutable(mlp.files["aoti"], "cpu").in_tiles(kinds, 256)
    with pytest.raises(RunError, match="kind"):
        Session(mlp.signature, executable).bind(*mlp.collections({"n": 3}))


@pytest.mark.parametrize(
    ("signature", "tiles"),
    [
        (mlp_signature(127), ()),
        (mlp_signature(128), (64,)),
        (mlp_signature(5000, (1000, 4099)), (64, 256, 1024)),
        (served.EVENT, ()),
    ],
    ids=["127 rows", "128 rows", "5000 rows", "two dimensions"],
)
def test_tiles_of_at_most_half_of_the_rows_are_tried(
    signature: Signature, tiles: tuple[int, ...]
) -> None:
    assert tiles_of(signature) == tiles


def test_rows_of_several_dimensions_have_no_tiles() -> None:
    assert detector.signature().tile_kinds is None


def test_the_reference_has_more_rows_than_two_tiles(mlp: Built) -> None:
    assert {"n": 2049} in make_cases(mlp.signature)


@pytest.mark.parametrize("engine", ["aoti", "exported"])
def test_the_fastest_tile_is_one_of_those_tried(mlp: Built, engine: str) -> None:
    assert fastest_tile(mlp.session(engine), mlp.inputs) in (None, 64, 256, 1024)


@pytest.mark.parametrize(("engine", "threads"), [("aoti", 1), ("aoti", 2), ("torchscript", 1)])
def test_a_session_takes_the_tile_of_its_artifact(
    jets: project.Built, tmp_path: Path, engine: str, threads: int
) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][project.TARGET]
        record["candidates"][engine]["tile"] = 256
        record["chosen"], record["below"] = engine, []

    with_tile = project.resealed(jets.bundle, tmp_path / "tiled", edit)
    session = pipeline.load(with_tile.path, mode="test", threads=threads)
    project.require_right(session, engine, n=601)
