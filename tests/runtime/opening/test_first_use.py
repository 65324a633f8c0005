"""An artifact that only an emulator has run is validated on the first host with its device."""

from __future__ import annotations

import json
from collections.abc import Callable
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


def emulated_record(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a target with one artifact, which only an emulator has run."""
    candidate = {**record["candidates"][ENGINE], "status": "emulated"}
    changes = {"status": "emulated", "chosen": ENGINE, "below": []}
    return {**record, **changes, "candidates": {ENGINE: candidate}}


def emulated(built: Built, folder: Path, tolerance: float | None = None) -> Path:
    """A promoted copy whose target no device has run; `tolerance` replaces those of all outputs."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["targets"] = {TARGET: emulated_record(manifest["targets"][TARGET])}
        if tolerance is not None:
            for limits in manifest["tolerances"].values():
                limits.update(atol=tolerance, rtol=tolerance, max_outside=0.0)

    return vouched(resealed(built.bundle, folder, edit))


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this host's verdicts, which is not there yet."""
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "first-use-notes"


@pytest.fixture
def forbid_validation(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, a validation fails the test."""

    def forbid() -> None:
        monkeypatch.setattr(promotion, "revalidate", lambda *_: pytest.fail("it is asked again"))

    return forbid


def test_it_is_validated_once_and_then_production_runs_it(
    bare_jets: Built, tmp_path: Path, notes: Path, forbid_validation: Callable[[], None]
) -> None:
    folder = emulated(bare_jets, tmp_path / "edited")
    origin = load(folder).origin
    assert origin is not None and origin.engine == ENGINE
    (note,) = notes.iterdir()
    assert json.loads(note.read_text()) is None  # nothing speaks against it
    forbid_validation()
    load(folder)


REFUSED = r"was emulated .* refused on this .*: .*deviation \d"


def test_wrong_answers_are_refused_with_the_numbers(
    bare_jets: Built, tmp_path: Path, notes: Path
) -> None:
    folder = emulated(bare_jets, tmp_path / "edited", tolerance=0.0)
    with pytest.raises(LoadError, match=REFUSED) as caught:
        load(folder)
    assert caught.value.code == "load-not-verified"


def test_a_refusal_is_remembered(
    bare_jets: Built, tmp_path: Path, notes: Path, forbid_validation: Callable[[], None]
) -> None:
    folder = emulated(bare_jets, tmp_path / "edited", tolerance=0.0)
    with pytest.raises(LoadError):
        load(folder)
    (note,) = notes.iterdir()
    assert "deviation" in json.loads(note.read_text())
    forbid_validation()
    with pytest.raises(LoadError, match=REFUSED):
        load(folder)


def test_without_torch_nothing_is_validated(
    bare_jets: Built, tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "has_torch", lambda: False)
    folder = emulated(bare_jets, tmp_path / "edited")
    with pytest.raises(LoadError, match="pip install torch") as caught:
        load(folder)
    assert caught.value.code == "load-without-torch"
    assert not notes.exists()  # no verdict is recorded


def test_a_worker_without_torch_refuses_a_target_that_must_be_validated(
    bare_jets: Built, tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][TARGET]
        verified = {**record, "raced_with": []}
        manifest["targets"] = {TARGET: emulated_record(record), "cpu/x86-64-v2": verified}

    folder = vouched(resealed(bare_jets.bundle, tmp_path / "edited", edit))
    monkeypatch.setattr(target_choice, "torch_runs_on", lambda device: False)
    with pytest.raises(LoadError, match=f"{TARGET} is emulated"):
        load(folder, target=TARGET)
    assert not notes.exists()


def test_a_verified_target_of_a_lower_level_runs_rather_than_one_to_be_validated(
    bare_jets: Built, tmp_path: Path, notes: Path
) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][TARGET]
        unverified, verified = {**record, "status": "compiles"}, {**record, "raced_with": []}
        manifest["targets"] = {TARGET: unverified, "cpu/x86-64-v2": verified}

    folder = resealed(bare_jets.bundle, tmp_path / "edited", edit).path
    origin = load(folder, mode="test").origin
    assert origin is not None and origin.target == "cpu/x86-64-v2"
    assert not notes.exists()
