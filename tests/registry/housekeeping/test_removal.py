"""Removing versions: with a record, never one with an alias, completely or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from registry import Bundle, NotFoundError, Ref, Registry, RegistryError, Version
from registry.housekeeping.garbage import collect
from registry.housekeeping.removal import remove
from tests.models import registries
from tests.models.bundles import MakeBundle, write_annex
from tests.models.mlflow_server import client_of
from tests.registry.history.test_model_writer import killed

CUDA = "cuda/sm_90"


def run_of(version: Version) -> Path:
    """The folder of the version's run, with all its files."""
    return registries.folder_of(version).parents[1]


@pytest.fixture
def version(
    registry: Registry, promoted: list[Version], tmp_path: Path, make_bundle: MakeBundle
) -> Version:
    """A version without an alias, to which a target was added."""
    return registry.add_target(
        promoted[2], write_annex(tmp_path / "annex", Bundle.open(make_bundle(2)), CUDA)
    )


def test_all_files_of_a_version_are_removed(registry: Registry, version: Version) -> None:
    size = sum(p.stat().st_size for p in run_of(version).rglob("*") if p.is_file())
    done = remove(registry, Ref("jets", 3), "a typo in the config")
    assert (done.version, done.bytes) == (version, size)
    assert not run_of(version).exists()
    with pytest.raises(NotFoundError, match="no such version; there are: 1-2"):
        registry.find("jets/3")
    assert collect(registry) == []


def test_the_history_says_what_was_removed(registry: Registry, version: Version) -> None:
    done = remove(registry, Ref("jets", 3), "a typo in the config")
    event = registry.history("jets")[-1]
    assert event == done.event
    assert (event.kind, event.version, event.state) == ("removal", 3, "done")
    assert event.title == "removal of jets/3"
    assert event.digests == {"jets/3": version.digest}
    assert event.annexes == version.annexes
    assert event.reason == "a typo in the config"
    assert event.by
    assert event.before == event.after == {"production": 2, "previous": 1}


def test_its_number_is_not_given_again(
    registry: Registry, promoted: list[Version], make_bundle: MakeBundle
) -> None:
    remove(registry, Ref("jets", 3))
    with pytest.raises(NotFoundError):
        registry.approve(promoted[2], "ada")
    with pytest.raises(NotFoundError):
        remove(registry, Ref("jets", 3))
    assert registry.register(Bundle.open(make_bundle(2))).ref == "jets/4"


def test_the_last_one(registry: Registry, bundle: Bundle) -> None:
    registry.register(bundle)
    remove(registry, Ref("jets", 1))
    assert registry.list() == []
    assert [event.title for event in registry.history("jets")] == ["removal of jets/1"]
    assert registry.register(bundle).ref == "jets/2"


@pytest.mark.parametrize("number", [1, 2])
def test_a_version_with_an_alias(registry: Registry, promoted: list[Version], number: int) -> None:
    held = {1: "previous", 2: "production"}[number]
    with pytest.raises(RegistryError) as caught:
        remove(registry, Ref("jets", number))
    assert str(caught.value) == f"jets/{number} is @{held}: move that to another version first"
    assert len(registry.history("jets")) == 2
    assert registry.open(registry.find(f"jets/{number}")).digest == promoted[number - 1].digest


def test_which_one_is_said_by_its_number(registry: Registry, promoted: list[Version]) -> None:
    for ref in (Ref("jets"), Ref("jets", alias="production")):
        with pytest.raises(RegistryError, match="say which version by its number, as jets/3"):
            remove(registry, ref)
    for ref in (Ref("jets", 9), Ref("tracks", 1)):
        with pytest.raises(NotFoundError):
            remove(registry, ref)


def test_files_that_another_version_has(registry: Registry, promoted: list[Version]) -> None:
    """MLflow's own page can make such a version."""
    client = client_of(registry)
    client.create_registered_model("copies")
    client.create_model_version("copies", promoted[2].source, run_id=promoted[2].run_id)
    with pytest.raises(RegistryError, match="jets/3: copies/1 has the same files: remove it first"):
        remove(registry, Ref("jets", 3))
    client.delete_model_version("jets", "3")  # with MLflow, not with ours
    assert collect(registry) == []
    assert run_of(promoted[2]).exists()


def test_damaged_files(registry: Registry, promoted: list[Version]) -> None:
    shutil.rmtree(run_of(promoted[2]) / "artifacts/bundle/targets")
    client = client_of(registry)
    client.delete_run(str(promoted[2].run_id))
    remove(registry, Ref("jets", 3))
    assert not run_of(promoted[2]).exists()


@pytest.mark.parametrize(
    ("at", "foreseen"),
    [
        ("create_run", []),
        ("delete_model_version", ["void"]),
        ("set_terminated", ["done"]),
        ("delete_run", ["done"]),
    ],
)
def test_broken_off(
    registry: Registry, promoted: list[Version], at: str, foreseen: list[str]
) -> None:
    """Killed before it writes the event, deletes the version, ends the event or deletes the run."""
    killed(lambda: remove(registry, Ref("jets", 3)), at)
    gone = foreseen == ["done"]
    assert [v.number for v in registry.versions("jets")] == ([1, 2] if gone else [1, 2, 3])
    assert run_of(promoted[2]).exists() is (at != "delete_run")
    assert [event.state for event in registry.history("jets")[2:]] == foreseen

    found = collect(registry)
    assert [each.kind for each in found] == (["removed version"] if gone else [])
    assert [event.state for event in registry.history("jets")[2:]] == foreseen
    assert run_of(promoted[2]).exists() is not gone
    assert collect(registry) == []
    if not gone:
        registry.open(registry.find("jets/3"))
        remove(registry, Ref("jets", 3))


def test_a_builder_that_comes_too_late(
    registry: Registry, promoted: list[Version], tmp_path: Path, make_bundle: MakeBundle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The version is removed while the files of one more target are copied."""
    from registry.store import upload

    annex = write_annex(tmp_path / "annex", Bundle.open(make_bundle(2)), CUDA)
    plain = upload.upload_annex

    def slow(*arguments: object) -> None:
        plain(*arguments)  # type: ignore[arg-type]
        remove(registry, Ref("jets", 3))

    monkeypatch.setattr(upload, "upload_annex", slow)
    with pytest.raises(NotFoundError, match="jets/3: no such version"):
        registry.add_target(promoted[2], annex)
    assert [path for path in run_of(promoted[2]).rglob("*") if path.is_file()] == []
