"""Versions that were registered earlier still open, can be promoted and rolled back.

The archive holds a registry of November 2026, made by `run`, `promote`, `policy`, `approve`,
`build` and `pull`: jets/1 is @previous, jets/2 (with a target that was built later) is @production,
jets/3 is new, and a policy asks for the approval of ada. The archive also holds the folder pulled
from jets@production.
"""

from __future__ import annotations

import sqlite3
import tarfile
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import pipeline
from tests.models.project import cli

ARCHIVE = Path(__file__).parent / "registry-2026-11.tar.xz"
PLACES = {
    "runs": ("artifact_uri",),
    "experiments": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}


def unpack(folder: Path) -> Path:
    """The folder, with the old registry and a pulled version in it."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
        archive.extractall(folder)
    with sqlite3.connect(folder / "store" / "registry.db") as database:
        for table, columns in PLACES.items():
            for column in columns:  # a local registry holds absolute paths
                database.execute(
                    f"update {table} set {column} = replace({column}, '/REGISTRY', ?)",
                    (str(folder / "store"),),
                )
    database.close()
    return folder


def uri_of(unpacked: Path) -> str:
    """The registry in an unpacked folder."""
    return f"sqlite:///{unpacked}/store/registry.db"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("old"))


@pytest.fixture
def registry(unpacked: Path) -> str:
    return uri_of(unpacked)


def answers(session: pipeline.Session) -> dict[str, np.ndarray]:
    """The answers to ten equal rows."""
    n = 10
    jets, tags = session.collection("jets", n), session.collection("tags", n)
    for i, name in enumerate("abcdef"):
        jets[name][:] = 0.1 * i
    session.run(jets, tags)
    return {name: np.array(tags[name]) for name in "xyz"}


@pytest.mark.parametrize("ref", ["jets@production", "jets@previous", "jets/1"])
@pytest.mark.parametrize("mode", ["production", "test"])
def test_an_old_version_loads_and_gives_probabilities(
    registry: str, ref: str, mode: Literal["production", "test"]
) -> None:
    probabilities = answers(pipeline.load(ref, registry=registry, mode=mode))
    assert np.isfinite(probabilities["x"]).all()
    np.testing.assert_allclose(sum(probabilities.values()), 1, rtol=1e-5)


def test_a_pulled_folder_answers_as_the_version_does(unpacked: Path, registry: str) -> None:
    folder = answers(pipeline.load(unpacked / "pulled"))
    version = answers(pipeline.load("jets@production", registry=registry))
    for name, values in folder.items():
        np.testing.assert_array_equal(values, version[name])


def test_an_old_version_that_no_gate_let_pass_is_refused(registry: str) -> None:
    with pytest.raises(pipeline.LoadError, match=r"jets/3"):
        pipeline.load("jets/3", registry=registry)


def version_in_production(registry: str) -> str | None:
    """The number of the version that production runs."""
    session = pipeline.load("jets@production", registry=registry)
    assert session.origin is not None
    return session.origin.version


PROMOTION = ("promote", "jets/3", "--to", "production", "--max-slowdown", "1000", "--registry")


def test_the_policy_of_an_old_registry_asks_for_an_approval(tmp_path: Path) -> None:
    registry = uri_of(unpack(tmp_path))
    assert "approvals" in cli(*PROMOTION, registry, code=1).output
    assert version_in_production(registry) == "2"


def test_a_promotion_in_an_old_registry_is_rolled_back(tmp_path: Path) -> None:
    registry = uri_of(unpack(tmp_path))
    cli("approve", "jets/3", "--as", "ada", "--registry", registry)
    cli(*PROMOTION, registry)
    assert version_in_production(registry) == "3"
    cli("rollback", "jets", "--registry", registry)
    assert version_in_production(registry) == "2"
    assert cli("history", "jets", "--registry", registry).stdout.count("rollback") == 1


@pytest.mark.parametrize("mode", ["production", "test"])
def test_an_old_version_takes_only_windows_that_keep_the_alignment(
    registry: str, mode: Literal["production", "test"]
) -> None:
    """It was not validated on windows."""
    session = pipeline.load("jets@production", registry=registry, mode=mode)
    jets, tags = session.collection("jets", 80), session.collection("tags", 80)
    for i, name in enumerate("abcdef"):
        jets[name][:] = 0.1 * i
    session.run(jets.window(32, 42), tags.window(64, 74))
    for name, values in answers(session).items():
        np.testing.assert_array_equal(tags[name][64:74], values)
        assert not tags[name][:64].any() and not tags[name][74:].any()
    with pytest.raises(pipeline.BindError, match="row 33"):
        session.bind(jets.window(33, 43), tags.window(64, 74))
