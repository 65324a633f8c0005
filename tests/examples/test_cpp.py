"""The C++ examples: built with CMake, run without Python, equal to Python bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pipeline
from engines.target import Target
from registry.bundle.bundle import Bundle
from registry.bundle.card import CARD
from tests.models import cplusplus, project
from tests.models.cplusplus import ROOT, computed, run
from tests.models.project import Built


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cplusplus.installed(tmp_path_factory)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, prefix: Path) -> Path:
    build = tmp_path_factory.mktemp("cpp")
    return cplusplus.built(ROOT / "examples" / "cpp", build, f"-DCMAKE_PREFIX_PATH={prefix}")


def artifact(bundle: Bundle) -> Path:
    return bundle.path / "targets" / str(Target.parse("cpu")) / "aoti"


@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_cpp_prints_the_bits_that_python_computes(
    programs: Path, request: pytest.FixtureRequest, storage: str
) -> None:
    bundle = request.getfixturevalue("jets" if storage == "buffer" else "loose").bundle
    session = pipeline.load(bundle.path, mode="test", engine_name="aoti")
    assert session.layout("jets").storage == storage
    for n in (0, 1, 33, 1000):
        assert printed(programs, artifact(bundle), n) == computed(session, n)


def test_cpp_runs_in_the_tiles_that_the_artifact_was_proven_with(
    programs: Path, jets: Built, tmp_path: Path
) -> None:
    tiled = project.in_tiles(jets.bundle, tmp_path / "tiled", 128)
    session = pipeline.load(tiled.path, mode="test", engine_name="aoti")
    for n in (1, 255, 256, 999):
        assert printed(programs, artifact(tiled), n) == computed(session, n)
    card = artifact(tiled) / CARD  # more rows than it was compiled for
    card.write_text(re.sub("(tile .*) 1000", r"\1 5000", card.read_text()))
    beyond = set(printed(programs, artifact(tiled), 5000))
    assert len(beyond) == 15_000 and beyond >= set(computed(session, 896))
    refused = run(programs / "run_bundle", artifact(tiled), 5001, "jets", "tags")
    assert (refused.returncode, "5001" in refused.stderr) == (1, True)


def printed(programs: Path, folder: Path, n: int) -> list[str]:
    """The answers of the C++ program, as lines `column row bits`."""
    done = run(programs / "run_bundle", folder, n, "jets", "tags")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_cpp_refuses_what_does_not_fit(programs: Path, jets: Built, tmp_path: Path) -> None:
    program, folder = programs / "run_bundle", artifact(jets.bundle)
    above = run(program, folder, 1001, "jets", "tags")
    assert above.returncode == 1
    assert "n = 1001 is outside the compiled range 0 ... 1000" in above.stderr
    nowhere = run(program, tmp_path, 1, "jets", "tags")
    assert (nowhere.returncode, "arguments.txt: cannot be read" in nowhere.stderr) == (1, True)
    (tmp_path / "arguments.txt").write_text("soa-arguments 3\n")
    later = run(program, tmp_path, 1, "jets", "tags")
    assert (later.returncode, "not a description of arguments" in later.stderr) == (1, True)
    unknown = run(program, folder, 1, "jets", "labels")
    assert (unknown.returncode, "no collection 'labels'" in unknown.stderr) == (1, True)
    assert run(program).returncode == 2


def test_the_producer_wants_the_demos_columns(programs: Path, jets: Built) -> None:
    done = run(programs / "producer", jets.bundle.path, 20, "--test")
    assert done.returncode == 1
    assert "no column 'pt'" in done.stderr
