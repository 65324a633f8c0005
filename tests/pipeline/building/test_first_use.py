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
    """The bundle of jets, packaged for a GPU that no host has."""
    return resealed(jets.bundle, tmp_path_factory.mktemp("bundle") / "jets", for_another_host)


@pytest.fixture(scope="module")
def built_cache(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache after a build at first use."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINE_CACHE", str(cache))
        session = pipeline.load(bundle.path, mode="test", build="missing")
    assert isinstance(session, CheckedSession)
    require_right(session, "exported")
    return cache


@pytest.fixture
def cache(built_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the cache, which a test may use and damage."""
    copy = Path(shutil.copytree(built_cache, tmp_path / "cache"))
    monkeypatch.setenv("PIPELINE_CACHE", str(copy))
    return copy


def annex_in(cache: Path) -> Path:
    """The folder of the only artifact that was built at first use."""
    (record,) = cache.rglob("annex.json")
    return record.parent


def test_nothing_is_built_if_the_caller_does_not_ask(bundle: Bundle, cache: Path) -> None:
    with pytest.raises(TargetError, match="no artifact for the CPU; this version holds: cuda/sm_2"):
        pipeline.load(bundle.path, mode="test")


def test_what_was_built_is_a_validated_artifact(bundle: Bundle, built_cache: Path) -> None:
    annex = annex_in(built_cache)
    assert annex.relative_to(built_cache).parts[:3] == ("built", bundle.digest, "cpu.x86-64-v3")
    record = json.loads((annex / "annex.json").read_text())
    assert (record["base"], record["target"]) == (bundle.digest, TARGET)
    assert record["record"]["candidates"]["exported"]["status"] == "valid"
    validation = json.loads((annex / "reports/validation.json").read_text())[TARGET]["exported"]
    assert len(validation["cases"]) > 5


def test_a_build_at_first_use_leaves_no_work_and_changes_no_bundle(
    bundle: Bundle, built_cache: Path
) -> None:
    assert not list(built_cache.rglob("*.work"))
    assert Bundle.open(bundle.path).digest == bundle.digest


@pytest.mark.parametrize("target", [None, TARGET])
def test_the_next_load_takes_what_was_built(
    bundle: Bundle, cache: Path, target: str | None
) -> None:
    before = annex_in(cache).stat().st_ino
    session = pipeline.load(bundle.path, mode="test", build="missing", target=target)
    require_right(session, "exported")
    assert annex_in(cache).stat().st_ino == before


def test_the_next_load_for_any_device_takes_what_was_built(bundle: Bundle, cache: Path) -> None:
    before = annex_in(cache).stat().st_ino
    loaded = pipeline.load(bundle.path, mode="test", build="missing", device="auto")
    require_right(loaded.on("cpu"), "exported")
    assert annex_in(cache).stat().st_ino == before


@pytest.fixture
def pulled(bundle: Bundle, cache: Path, tmp_path: Path) -> Path:
    """The bundle as `pipeline pull` writes it, but without the note that it was promoted."""
    return Path(shutil.copytree(bundle.path, tmp_path / "pulled"))


def test_nothing_is_built_for_production_that_was_not_promoted(pulled: Path) -> None:
    with pytest.raises(LoadError, match="a folder that no promotion vouches for"):
        pipeline.load(pulled, build="missing")


def test_a_promoted_version_is_built_for_production_at_first_use(
    bundle: Bundle, pulled: Path
) -> None:
    write_note(pulled, PulledNote("jets/1", bundle.digest, "somebody", "then"))
    with pytest.raises(TargetError):
        pipeline.load(pulled)
    session = pipeline.load(pulled, build="missing")
    assert type(session) is Session
    require_right(session, "exported")


def test_a_damaged_artifact_is_built_again_by_one_of_two_builders(
    bundle: Bundle, cache: Path
) -> None:
    file = annex_in(cache) / "reports/validation.json"
    file.write_text("{}")
    before = annex_in(cache).stat().st_ino

    def build() -> Annex:
        return build_at_first_use(bundle, Target.parse(TARGET))

    with ThreadPoolExecutor(2) as pool:
        builds = [pool.submit(build) for _ in range(2)]
        assert len({future.result().digest for future in builds}) == 1
    assert annex_in(cache).stat().st_ino != before
    assert json.loads(file.read_text())[TARGET]["exported"]["valid"]


def test_a_build_that_does_not_validate_is_not_run(
    jets: Built, heavy: Built, cache: Path, tmp_path: Path
) -> None:
    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        for_another_host(folder, manifest)
        shutil.copy(heavy.bundle.file("program.pt2"), folder / "program.pt2")

    wrong = resealed(jets.bundle, tmp_path / "wrong", edit)
    with pytest.raises(StageError, match=f"no artifact of 'jets' for {TARGET} is valid: "):
        pipeline.load(wrong.path, mode="test", build="missing")
    assert not list((cache / "built" / wrong.digest).rglob("annex.json"))


def test_nothing_is_built_for_a_target_with_a_verified_artifact(jets: Built, cache: Path) -> None:
    session = pipeline.load(jets.bundle.path, mode="test", build="missing")
    assert session.origin is not None
    assert session.origin.target == TARGET
    assert not (cache / "built" / jets.bundle.digest).exists()


def test_build_is_never_or_missing(bundle: Bundle) -> None:
    with pytest.raises(LoadError, match="build 'always' is neither 'never' nor 'missing'"):
        pipeline.load(bundle.path, mode="test", build="always")  # type: ignore[call-overload]


def test_a_cache_that_cannot_be_written_is_named(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(LoadError, match=r"cannot build jets for .*: Not a directory: name another"):
        pipeline.load(bundle.path, mode="test", build="missing")
