"""An artifact that only an emulator has run is validated on the first host with its device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline import loading, promotion
from pipeline.loading import load
from runtime.errors import LoadError
from runtime.opening import target_choice
from tests.models.project import TARGET, Built, resealed
from tests.models.versions import vouched

ENGINE = "lanes"


def emulated(built: Built, folder: Path, tolerance: float | None = None) -> Path:
    """A promoted copy whose target no device has run; `tolerance` replaces those of all outputs."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][TARGET]
        candidate = {**record["candidates"][ENGINE], "status": "emulated"}
        changes = {"status": "emulated", "chosen": ENGINE, "below": []}
        manifest["targets"] = {TARGET: {**record, **changes, "candidates": {ENGINE: candidate}}}
        for each in manifest["tolerances"].values() if tolerance is not None else ():
            each.update(atol=tolerance, rtol=tolerance, max_outside=0.0)

    return vouched(resealed(built.bundle, folder, edit))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "first-use-notes"


def test_it_is_validated_once_and_then_production_runs_it(
    bare_jets: Built, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = emulated(bare_jets, tmp_path / "edited")
    origin = load(folder).origin
    assert origin is not None and origin.engine == ENGINE
    (note,) = cache.iterdir()
    assert json.loads(note.read_text()) is None
    monkeypatch.setattr(promotion, "revalidate", lambda *_: pytest.fail("it is asked again"))
    load(folder)


REFUSED = r"was emulated .* refused on this .*: .*deviation \d"


def test_wrong_answers_are_refused_with_the_numbers(
    bare_jets: Built, tmp_path: Path, cache: Path
) -> None:
    folder = emulated(bare_jets, tmp_path / "edited", tolerance=0.0)
    with pytest.raises(LoadError, match=REFUSED) as refused:
        load(folder)
    assert refused.value.code == "load-not-verified"


def test_a_refusal_is_remembered(
    bare_jets: Built, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = emulated(bare_jets, tmp_path / "edited", tolerance=0.0)
    with pytest.raises(LoadError):
        load(folder)
    assert "deviation" in json.loads(next(cache.iterdir()).read_text())
    monkeypatch.setattr(promotion, "revalidate", lambda *_: pytest.fail("it is asked again"))
    with pytest.raises(LoadError, match=REFUSED):
        load(folder)


def test_without_torch_nothing_is_validated(
    bare_jets: Built, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "has_torch", lambda: False)
    folder = emulated(bare_jets, tmp_path / "edited")
    with pytest.raises(LoadError, match="pip install torch") as refused:
        load(folder)
    assert refused.value.code == "load-without-torch"
    assert not cache.exists()  # no verdict is recorded


def test_a_worker_without_torch_names_what_waits(
    bare_jets: Built, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][TARGET]
        candidate = {**record["candidates"][ENGINE], "status": "emulated"}
        waits = {**record, "status": "emulated", "chosen": ENGINE, "below": []}
        manifest["targets"] = {
            TARGET: {**waits, "candidates": {ENGINE: candidate}},
            "cpu/x86-64-v2": {**record, "raced_with": []},
        }

    folder = vouched(resealed(bare_jets.bundle, tmp_path / "edited", edit))
    monkeypatch.setattr(target_choice, "torch_runs_on", lambda device: False)
    with pytest.raises(LoadError, match=f"{TARGET} is emulated"):
        load(folder, target=TARGET)
    assert not cache.exists()


def test_what_was_verified_comes_first(bare_jets: Built, tmp_path: Path, cache: Path) -> None:
    """A verified target of a lower CPU level runs rather than a higher one to be validated."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][TARGET]
        waits = {**record, "status": "compiles"}
        manifest["targets"] = {TARGET: waits, "cpu/x86-64-v2": {**record, "raced_with": []}}

    folder = resealed(bare_jets.bundle, tmp_path / "edited", edit).path
    origin = load(folder, mode="test").origin
    assert origin is not None and origin.target == "cpu/x86-64-v2"
    assert not cache.exists()
