from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.promotion import measuring
from registry.store.registry import Registry
from runtime.opening import Opened
from soa.files import digest_of
from stages.reports import ValidationReport
from tests.models import environment
from tests.models.project import Built
from tests.models.versions import copy_of, store_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with every file that the configs of these tests name."""
    for name in ("model.py", "data.py", "weights.safetensors", "model.pt2", "model.ts"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture(autouse=True)
def own_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test works in a new folder, in which it may leave none of MLflow's default folders."""
    folder = environment.alone(tmp_path, monkeypatch)
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="session")
def store_of_jets(
    jets: Built, empty_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of `registry`, made once for all tests."""
    return store_of(
        tmp_path_factory, empty_database, lambda registry: registry.register(jets.bundle)
    )


@pytest.fixture
def registry(store_of_jets: Path, tmp_path: Path) -> Registry:
    """A registry with jets/1 for this test."""
    return copy_of(store_of_jets, tmp_path / "store")


_reports: dict[tuple[str, str, str], ValidationReport] = {}


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes promotions quick, for tests of other gates than tolerance and speed.

    Each artifact is validated only once in this process, and no version is timed against another.
    """
    validate = measuring.revalidate

    def revalidate(opened: Opened, target: str, engine: str, say: Any = None) -> ValidationReport:
        candidate = opened.bundle.manifest.targets[target].candidates[engine]
        reference = opened.bundle.file(opened.bundle.manifest.reference)
        files = [reference, *(opened.bundle.file(name) for name in candidate.files)]
        key = (target, engine, repr((candidate, [digest_of(file) for file in files])))
        if key not in _reports:
            _reports[key] = validate(opened, target, engine)
        return _reports[key]

    monkeypatch.setattr(measuring, "revalidate", revalidate)
    monkeypatch.setattr(measuring, "_compare_speed", lambda *_: None)
