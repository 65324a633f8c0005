"""Bundles with random bytes as artifacts, and separate registries for each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from registry import Bundle, Manifest, Ref, Registry, Version
from soa.records import as_record
from tests.models import bundles, environment, registries
from tests.models.bundles import PASSED
from tests.models.shared import made_once


@pytest.fixture
def manifest_data() -> dict[str, Any]:
    """A manifest as plain JSON data: one verified target with a valid and a failed candidate."""
    return bundles.manifest_data()


@pytest.fixture
def manifest(manifest_data: dict[str, Any]) -> Manifest:
    return as_record(Manifest, manifest_data)


@pytest.fixture
def make_bundle(tmp_path: Path, manifest_data: dict[str, Any]) -> Callable[..., Path]:
    """`make_bundle(seed=0, **fields of the manifest)`: the path of a sealed bundle folder.

    Equal arguments give equal bytes, another seed gives other weights.
    """
    numbers = itertools.count(1)

    def make(seed: int = 0, **fields: Any) -> Path:
        path = tmp_path / "bundles" / str(next(numbers))
        bundles.write_bundle(path, as_record(Manifest, manifest_data | fields), seed)
        return path

    return make


@pytest.fixture
def bundle(make_bundle: Callable[..., Path]) -> Bundle:
    return Bundle.open(make_bundle())


@pytest.fixture
def new_registry(tmp_path: Path, empty_database: Path) -> Callable[[str], Registry]:
    """Makes an empty registry in a folder of this name."""

    def make(name: str) -> Registry:
        registries.copy(empty_database.parent, tmp_path / name)
        return Registry(f"sqlite:///{tmp_path}/{name}/registry.db")

    return make


@pytest.fixture
def registry(new_registry: Callable[[str], Registry]) -> Registry:
    return new_registry("store")


@pytest.fixture
def away(new_registry: Callable[[str], Registry]) -> Registry:
    """A second registry."""
    return new_registry("away")


@pytest.fixture(scope="session")
def store_of_three(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    """A registry with jets/1 to jets/3, which each test copies."""

    def make(folder: Path) -> None:
        registries.copy(empty_database.parent, folder / "store")
        registry = Registry(f"sqlite:///{folder}/store/registry.db")
        for seed in range(3):
            registry.register(bundles.made_bundle(folder / "bundles" / str(seed), seed))

    return made_once(tmp_path_factory, "store-of-three", make) / "store"


@pytest.fixture(scope="session")
def store_of_promoted(tmp_path_factory: pytest.TempPathFactory, store_of_three: Path) -> Path:
    """The registry of `store_of_three` after two promotions."""

    def make(folder: Path) -> None:
        registries.copy(store_of_three, folder / "store")
        registry = Registry(f"sqlite:///{folder}/store/registry.db")
        for number in (1, 2):
            registry.promote(registry.find(Ref("jets", number)), "production", PASSED)

    return made_once(tmp_path_factory, "store-of-promoted", make) / "store"


@pytest.fixture
def three(registry: Registry, store_of_three: Path) -> list[Version]:
    """The versions jets/1, jets/2 and jets/3 of `registry`, without aliases."""
    registries.copy(store_of_three, registries.file_of(registry).parent)
    return list(registry.versions("jets"))


@pytest.fixture
def promoted(registry: Registry, three: list[Version], store_of_promoted: Path) -> list[Version]:
    """The versions: jets/2 is in production, jets/1 was before, jets/3 has no alias."""
    registries.copy(store_of_promoted, registries.file_of(registry).parent)
    return three


@pytest.fixture(autouse=True)
def own_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test works in a new folder, in which it may leave none of MLflow's default folders."""
    folder = environment.alone(tmp_path, monkeypatch)
    yield folder
    assert {path.name for path in folder.iterdir()} <= {"pipeline-registry"}
