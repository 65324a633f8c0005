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
        found = super().forward(x)
        return found - 0.5 * found.mean(0, keepdim=True)


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
    return write_project(tmp_path_factory.mktemp("unbounded"))


@pytest.fixture(scope="module")
def bundle(project: Project) -> Bundle:
    quick = ("[aoti, torchscript, exported]", "[onnxruntime, exported]")
    return Bundle.open(project.run(project.variant("any.yaml", UNBOUNDED, quick))["bundle"])


def test_every_candidate_has_a_tile_below_half_of_what_it_was_compiled_for(bundle: Bundle) -> None:
    candidates = bundle.manifest.targets[TARGET].candidates
    assert {name: c.status for name, c in candidates.items()} == dict.fromkeys(candidates, "valid")
    assert {c.tile for c in candidates.values()} == {64}
    sizes = [int(n) for n in candidates["exported"].benchmark]
    assert max(sizes) == 200
    assert "n: 0 or more" in cli("show", bundle.path).stdout


@pytest.mark.parametrize("engine", ["onnxruntime", "exported"])
def test_any_n_runs(bundle: Bundle, engine: str) -> None:
    """Test mode compares each answer with the program, which runs on all rows at once."""
    session = pipeline.load(bundle.path, mode="test", engine_name=engine)
    for n in (0, 1, 127, 128, 200, 201, 5000):
        require_right(session, n=n)


def test_a_tile_that_is_larger_than_half_of_what_was_compiled_is_refused(
    bundle: Bundle, tmp_path: Path
) -> None:
    for tile in (None, 101, 5000):

        def edit(_: Path, manifest: dict[str, Any], tile: int | None = tile) -> None:
            for candidate in manifest["targets"][TARGET]["candidates"].values():
                candidate["tile"] = tile

        other = resealed(bundle, tmp_path / str(tile), edit)
        with pytest.raises(SoaPipelineError, match=rf"tile {tile or 0}; 1 to 100 are possible"):
            pipeline.load(other.path, mode="test")


def test_memory_is_the_limit(bundle: Bundle) -> None:
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
def test_rows_that_see_each_other_have_no_such_artifact(
    project: Project, factory: str, tmp_path: Path
) -> None:
    config = other_model(project, factory, UNBOUNDED)
    said = refusal("run", config, "--work", tmp_path, "--registry", project.registry)
    assert "unbounded" in said and "others.py:" in said
    assert not list(tmp_path.glob("compile/*"))  # refused before candidates are compiled


def test_where_rows_see_each_other_nothing_runs_in_tiles_and_test_mode_shows_what_would(
    project: Project, tmp_path: Path
) -> None:
    config = other_model(project, "rare", (ROWS, "n: {max: 200, typical: [200]}"))
    bundle = Bundle.open(project.run(config)["bundle"])
    assert "others.py:" in (bundle.manifest.capture.dependence or "")
    assert not [step for step in bundle.manifest.provenance.seconds if step.startswith("tiles")]

    def by_trial(_: Path, manifest: dict[str, Any]) -> None:
        """Edits it like a version of a release that had a trial, but no check of the graph."""
        del manifest["capture"]["dependence"]
        for candidate in manifest["targets"][TARGET]["candidates"].values():
            candidate["tile"] = 64

    def for_any_n(folder: Path, manifest: dict[str, Any]) -> None:
        by_trial(folder, manifest)
        manifest["signature"]["rows"]["n"]["unbounded"] = True

    session = pipeline.load(resealed(bundle, tmp_path / "any", for_any_n).path, mode="test")
    few, many = ([session.collection(name, n) for name in ("jets", "tags")] for n in (100, 700))
    session.run(*few)
    with pytest.raises(DeviationError):
        session.run(*many)
    # It is not promoted either.
    version = Registry(project.registry).register(resealed(bundle, tmp_path / "old", by_trial))
    said = cli("promote", version.ref, "--to", "staging", "--registry", project.registry, code=1)
    assert "tolerance: " in said.output
    assert "see each other" in said.output and "others.py:" in said.output


def test_a_least_n_above_one_cannot_be_unbounded(project: Project) -> None:
    config = project.variant(
        "least.yaml", (ROWS, "n: {min: 2, max: 200, typical: [200], unbounded: true}")
    )
    with pytest.raises(SoaPipelineError, match="unbounded"):
        load_config(config)


def test_the_signature_of_a_bounded_version_is_what_it_was(project: Project) -> None:
    bounded = load_config(project.config).signature().to_dict()
    assert bounded["rows"] == {"n": {"min": 0, "max": 1000, "typical": [1000]}}
