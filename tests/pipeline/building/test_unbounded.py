"""A config with unbounded rows: any n runs in tiles, which are validated like other runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pipeline
from pipeline.config import load_config
from registry import Bundle
from registry.store.registry import Registry
from runtime.errors import DeviationError
from soa.errors import SoaPipelineError
from tests.models.project import (
    TARGET,
    Project,
    cli,
    refusal,
    require_right,
    resealed,
    write_project,
)

ROWS = "n: {max: 1000, typical: [1000]}"
UNBOUNDED = (ROWS, "n: {max: 200, typical: [200], unbounded: true}")
# _Coupled subtracts the mean of the rows. _Rare changes its answers from 150 rows on: a trial on
# parts of 256 rows may notice this, one on tiles of 100 rows never.
MODELS = """

class _Coupled(PointwiseFirst):
    def forward(self, x):
        scores = super().forward(x)
        return scores - 0.5 * scores.mean(0, keepdim=True)


class _Rare(PointwiseFirst):
    def forward(self, x):
        return super().forward(x) * (1 + x.shape[0] // 150)


def coupled(hidden=48):
    return _Coupled(0, hidden)


def rare(hidden=48):
    return _Rare(0, hidden)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project of `jets`, which is not run yet."""
    return write_project(tmp_path_factory.mktemp("unbounded"))


@pytest.fixture(scope="module")
def bundle(project: Project) -> Bundle:
    """A version for any number of rows, with artifacts of two engines."""
    quick = ("[aoti, torchscript, exported]", "[onnxruntime, exported]")
    return Bundle.open(project.run(project.variant("any.yaml", UNBOUNDED, quick))["bundle"])


MOST = 200  # rows, in UNBOUNDED


def test_every_candidate_has_a_tile_below_half_of_what_it_was_compiled_for(bundle: Bundle) -> None:
    candidates = bundle.manifest.targets[TARGET].candidates
    assert {name: c.status for name, c in candidates.items()} == dict.fromkeys(candidates, "valid")
    assert {c.tile for c in candidates.values()} == {64}  # the largest power of two below 100


def test_no_more_rows_are_timed_than_an_artifact_was_compiled_for(bundle: Bundle) -> None:
    timed = bundle.manifest.targets[TARGET].candidates["exported"].benchmark
    assert max(int(rows) for rows in timed) == MOST


def test_show_says_that_any_number_of_rows_runs(bundle: Bundle) -> None:
    assert "n: 0 or more" in cli("show", bundle.path).stdout


@pytest.mark.parametrize("engine", ["onnxruntime", "exported"])
def test_any_number_of_rows_runs(bundle: Bundle, engine: str) -> None:
    """Test mode compares each answer with the program, which runs on all rows at once."""
    session = pipeline.load(bundle.path, mode="test", engine_name=engine)
    for n in (0, 1, 2 * 64 - 1, 2 * 64, MOST, MOST + 1, 25 * MOST):
        require_right(session, n=n)


@pytest.mark.parametrize("tile", [None, MOST // 2 + 1, 25 * MOST])
def test_a_tile_that_is_larger_than_half_of_what_was_compiled_is_refused(
    bundle: Bundle, tmp_path: Path, tile: int | None
) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        for candidate in manifest["targets"][TARGET]["candidates"].values():
            candidate["tile"] = tile

    other = resealed(bundle, tmp_path / "other", edit)
    with pytest.raises(SoaPipelineError, match=rf"tile {tile or 0}; 1 to 100 are possible"):
        pipeline.load(other.path, mode="test")


def test_a_binding_takes_no_more_rows_than_its_memory_has(bundle: Bundle) -> None:
    session = pipeline.load(bundle.path, mode="test")
    jets, tags = session.collection("jets", 3, 700), session.collection("tags", 3, 700)
    binding = session.bind(jets, tags)
    binding(700)
    with pytest.raises(SoaPipelineError, match="701"):
        binding(701)


def other_model(project: Project, factory: str, *changes: tuple[str, str]) -> Path:
    """A config of one of `MODELS`, built for the portable program alone."""
    model = project.folder / "model.py"
    (project.folder / "others.py").write_text(model.read_text() + MODELS)
    line = next(line for line in project.config.read_text().splitlines() if "factory:" in line)
    return project.variant(
        f"{factory}.yaml",
        (line, line.replace("model.py:talkative", f"others.py:{factory}")),
        ("[aoti, torchscript, exported]", "[exported]"),
        *changes,
    )


@pytest.mark.parametrize("factory", ["coupled", "rare"])
def test_unbounded_rows_that_see_each_other_are_refused_before_compilers_run(
    project: Project, factory: str, tmp_path: Path
) -> None:
    config = other_model(project, factory, UNBOUNDED)
    message = refusal("run", config, "--work", tmp_path, "--registry", project.registry)
    assert "unbounded" in message and "others.py:" in message
    assert not list(tmp_path.glob("compile/*"))  # refused before candidates are compiled


@pytest.fixture(scope="module")
def rare(project: Project) -> Bundle:
    """A version whose rows see each other, with bounded rows."""
    config = other_model(project, "rare", (ROWS, "n: {max: 200, typical: [200]}"))
    return Bundle.open(project.run(config)["bundle"])


def with_tiles(_: Path, manifest: dict[str, Any]) -> None:
    """Edits it like a version of a release that had a trial, but no check of the graph."""
    del manifest["capture"]["dependence"]
    for candidate in manifest["targets"][TARGET]["candidates"].values():
        candidate["tile"] = 64


def test_where_rows_see_each_other_nothing_runs_in_tiles(rare: Bundle) -> None:
    assert "others.py:" in (rare.manifest.capture.dependence or "")
    assert not [step for step in rare.manifest.provenance.seconds if step.startswith("tiles")]


def test_test_mode_finds_rows_in_tiles_that_see_each_other(rare: Bundle, tmp_path: Path) -> None:
    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        with_tiles(folder, manifest)
        manifest["signature"]["rows"]["n"]["unbounded"] = True

    session = pipeline.load(resealed(rare, tmp_path / "any", edit).path, mode="test")
    few, many = ([session.collection(name, n) for name in ("jets", "tags")] for n in (100, 700))
    session.run(*few)
    with pytest.raises(DeviationError):
        session.run(*many)


def test_rows_in_tiles_that_see_each_other_are_not_promoted(
    project: Project, rare: Bundle, tmp_path: Path
) -> None:
    version = Registry(project.registry).register(resealed(rare, tmp_path / "old", with_tiles))
    where = ("--to", "staging", "--registry", project.registry)
    text = cli("promote", version.ref, *where, code=1).output
    assert "tolerance: " in text
    assert "see each other" in text and "others.py:" in text


def test_a_least_n_above_one_cannot_be_unbounded(project: Project) -> None:
    config = project.variant(
        "least.yaml", (ROWS, "n: {min: 2, max: 200, typical: [200], unbounded: true}")
    )
    with pytest.raises(SoaPipelineError, match="unbounded"):
        load_config(config)


def test_the_signature_of_a_bounded_version_does_not_name_unbounded(project: Project) -> None:
    bounded = load_config(project.config).signature().to_dict()
    assert bounded["rows"] == {"n": {"min": 0, "max": 1000, "typical": [1000]}}
