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
    """The folder of the artifact that C++ opens."""
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


@pytest.fixture
def tiled(jets: Built, tmp_path: Path) -> Bundle:
    """A version whose artifact runs in tiles of 128 rows."""
    return project.in_tiles(jets.bundle, tmp_path / "tiled", 128)


def test_cpp_runs_in_the_tiles_that_the_artifact_was_proven_with(
    programs: Path, tiled: Bundle
) -> None:
    session = pipeline.load(tiled.path, mode="test", engine_name="aoti")
    for n in (1, 255, 256, 999):
        assert printed(programs, artifact(tiled), n) == computed(session, n)


def for_5000_rows(tiled: Bundle) -> Path:
    """Its artifact, which is now said to run 5,000 rows. It was compiled for 1,000, so that more
    rows must run in tiles."""
    folder = artifact(tiled)
    card = folder / CARD
    card.write_text(re.sub("(tile .*) 1000", r"\1 5000", card.read_text()))
    return folder


def test_cpp_runs_more_rows_in_tiles_than_were_compiled_for(programs: Path, tiled: Bundle) -> None:
    """Whole tiles have the bits of Python: 896 rows are seven."""
    session = pipeline.load(tiled.path, mode="test", engine_name="aoti")
    lines = set(printed(programs, for_5000_rows(tiled), 5000))
    assert len(lines) == 5000 * 3 and lines >= set(computed(session, 7 * 128))


def test_cpp_refuses_more_rows_than_tiles_were_proven_for(programs: Path, tiled: Bundle) -> None:
    refused = run(programs / "run_bundle", for_5000_rows(tiled), 5001, "jets", "tags")
    assert refused.returncode == 1
    assert "5001" in refused.stderr


def printed(programs: Path, folder: Path, n: int) -> list[str]:
    """The answers of the C++ program, as lines `column row bits`."""
    done = run(programs / "run_bundle", folder, n, "jets", "tags")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("n", "outputs", "says"),
    [
        (1001, "tags", "n = 1001 is outside the compiled range 0 ... 1000"),
        (1, "labels", "no collection 'labels'"),
    ],
    ids=["rows", "collection"],
)
def test_cpp_refuses_what_does_not_fit(
    programs: Path, jets: Built, n: int, outputs: str, says: str
) -> None:
    done = run(programs / "run_bundle", artifact(jets.bundle), n, "jets", outputs)
    assert done.returncode == 1
    assert says in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "arguments.txt: cannot be read"),
        ("soa-arguments 3\n", "not a description of arguments"),
    ],
    ids=["none", "a later version"],
)
def test_cpp_refuses_a_folder_without_a_description_of_arguments(
    programs: Path, tmp_path: Path, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / "arguments.txt").write_text(text)
    done = run(programs / "run_bundle", tmp_path, 1, "jets", "tags")
    assert done.returncode == 1
    assert "arguments.txt" in done.stderr and says in done.stderr


def test_the_cpp_program_without_arguments_is_an_error_of_usage(programs: Path) -> None:
    assert run(programs / "run_bundle").returncode == 2


def test_the_producer_refuses_a_model_without_its_columns(programs: Path, jets: Built) -> None:
    done = run(programs / "producer", jets.bundle.path, 20, "--test")
    assert done.returncode == 1
    assert "no column 'pt'" in done.stderr
