"""Build at first use: on a host for which no artifact was packaged."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import pipeline
from engines.errors import TargetError
from engines.target import Target
from pipeline.building.add_target import build_at_first_use
from registry.bundle.annex import Annex
from registry.bundle.bundle import Bundle
from registry.bundle.pulled import PulledNote, write_note
from runtime.checked.test_mode import CheckedSession
from runtime.errors import LoadError
from runtime.session.session import Session
from stages.errors import StageError
from tests.models.project import TARGET, Built, require_right, resealed

ELSEWHERE = "cuda/sm_20"


def for_another_host(_: Path, manifest: dict[str, Any]) -> None:
    """Edits a version so that it was packaged for a GPU that no host has."""
    manifest["targets"] = {ELSEWHERE: manifest["targets"][TARGET]}
    manifest["provenance"]["config"]["engines"] = ["exported"]


@pytest.fixture(scope="module")
def bundle(jets: Built, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return resealed(jets.bundle, tmp_path_factory.mktemp("bundle") / "jets", for_another_host)


@pytest.fixture(scope="module")
def filled(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache after a build at first use."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINE_CACHE", str(cache))
        session = pipeline.load(bundle.path, mode="test", build="missing")
    assert isinstance(session, CheckedSession)
    require_right(session, "exported")
    return cache


@pytest.fixture
def cache(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the cache, which a test may use and damage."""
    copy = Path(shutil.copytree(filled, tmp_path / "cache"))
    monkeypatch.setenv("PIPELINE_CACHE", str(copy))
    return copy


def annex_of(cache: Path) -> Path:
    (found,) = cache.rglob("annex.json")
    return found.parent


def test_without_it_nothing_is_built(bundle: Bundle, cache: Path) -> None:
    with pytest.raises(TargetError, match="no artifact for the CPU; this version holds: cuda/sm_2"):
        pipeline.load(bundle.path, mode="test")


def test_what_was_built_is_a_proven_artifact(bundle: Bundle, filled: Path) -> None:
    place = annex_of(filled)
    assert place.relative_to(filled).parts[:3] == ("built", bundle.digest, "cpu.x86-64-v3")
    record = json.loads((place / "annex.json").read_text())
    assert (record["base"], record["target"]) == (bundle.digest, TARGET)
    assert record["record"]["candidates"]["exported"]["status"] == "valid"
    validated = json.loads((place / "reports/validation.json").read_text())[TARGET]["exported"]
    assert len(validated["cases"]) > 5
    assert not list(filled.rglob("*.work"))
    assert Bundle.open(bundle.path).digest == bundle.digest  # the bundle is unchanged


def test_the_next_time_it_is_there(bundle: Bundle, cache: Path) -> None:
    before = annex_of(cache).stat().st_ino
    for target in (None, TARGET):
        require_right(
            pipeline.load(bundle.path, mode="test", build="missing", target=target), "exported"
        )
    require_right(
        pipeline.load(bundle.path, mode="test", build="missing", device="auto").on("cpu"),
        "exported",
    )
    assert annex_of(cache).stat().st_ino == before


def test_production_only_if_promoted(bundle: Bundle, cache: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle.path, tmp_path / "pulled"))
    with pytest.raises(LoadError, match="a folder that no promotion vouches for"):
        pipeline.load(folder, build="missing")
    write_note(folder, PulledNote("jets/1", bundle.digest, "somebody", "then"))
    with pytest.raises(TargetError):
        pipeline.load(folder)
    session = pipeline.load(folder, build="missing")
    assert type(session) is Session
    require_right(session, "exported")


def test_a_damaged_one_is_built_again_once(bundle: Bundle, cache: Path) -> None:
    file = annex_of(cache) / "reports/validation.json"
    file.write_text("{}")
    before = annex_of(cache).stat().st_ino

    def builder() -> Annex:
        return build_at_first_use(bundle, Target.parse(TARGET))

    with ThreadPoolExecutor(2) as pool:
        one, other = (each.result() for each in (pool.submit(builder), pool.submit(builder)))
    assert one.digest == other.digest
    assert annex_of(cache).stat().st_ino != before
    assert json.loads(file.read_text())[TARGET]["exported"]["valid"]


def test_what_does_not_validate_is_not_run(
    jets: Built, heavy: Built, cache: Path, tmp_path: Path
) -> None:
    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        for_another_host(folder, manifest)
        shutil.copy(heavy.bundle.file("program.pt2"), folder / "program.pt2")

    wrong = resealed(jets.bundle, tmp_path / "wrong", edit)
    with pytest.raises(StageError, match=f"no artifact of 'jets' for {TARGET} is valid: "):
        pipeline.load(wrong.path, mode="test", build="missing")
    assert not list((cache / "built" / wrong.digest).rglob("annex.json"))


def test_a_verified_artifact_is_taken_as_it_is(jets: Built, cache: Path) -> None:
    session = pipeline.load(jets.bundle.path, mode="test", build="missing")
    assert session.origin is not None
    assert session.origin.target == TARGET
    assert not (cache / "built" / jets.bundle.digest).exists()


def test_mistakes(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoadError, match="build 'always' is neither 'never' nor 'missing'"):
        pipeline.load(bundle.path, mode="test", build="always")  # type: ignore[call-overload]
    (tmp_path / "file").touch()
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(LoadError, match=r"cannot build jets for .*: Not a directory: name another"):
        pipeline.load(bundle.path, mode="test", build="missing")
