"""Removing versions: with a record, never one with an alias, completely or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from registry import Bundle, NotFoundError, Ref, Registry, RegistryError, Version
from registry.housekeeping.garbage import collect
from registry.housekeeping.removal import remove
from registry.store import upload
from tests.models import registries
from tests.models.bundles import MakeBundle, write_annex
from tests.models.mlflow_server import client_of
from tests.registry.history.test_model_writer import kill_before

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
    size = sum(file.stat().st_size for file in run_of(version).rglob("*") if file.is_file())
    removed = remove(registry, Ref("jets", 3))
    assert (removed.version, removed.bytes) == (version, size)
    assert not run_of(version).exists()
    with pytest.raises(NotFoundError, match="no such version; there are: 1-2"):
        registry.find("jets/3")
    assert collect(registry) == []


def test_the_history_says_what_was_removed(registry: Registry, version: Version) -> None:
    removed = remove(registry, Ref("jets", 3), "a typo in the config")
    event = registry.history("jets")[-1]
    assert event == removed.event
    assert (event.kind, event.version, event.state) == ("removal", 3, "done")
    assert event.title == "removal of jets/3"
    assert event.digests == {"jets/3": version.digest}
    assert event.annexes == version.annexes
    assert event.reason == "a typo in the config"
    assert event.by
    assert event.before == event.after == {"production": 2, "previous": 1}


def test_a_removed_version_cannot_be_approved_or_removed(
    registry: Registry, promoted: list[Version]
) -> None:
    remove(registry, Ref("jets", 3))
    with pytest.raises(NotFoundError):
        registry.approve(promoted[2], "ada")
    with pytest.raises(NotFoundError):
        remove(registry, Ref("jets", 3))


@pytest.mark.usefixtures("promoted")
def test_its_number_is_not_given_again(registry: Registry, make_bundle: MakeBundle) -> None:
    remove(registry, Ref("jets", 3))
    assert registry.register(Bundle.open(make_bundle(2))).ref == "jets/4"


def test_a_model_whose_last_version_is_removed_keeps_its_history(
    registry: Registry, bundle: Bundle
) -> None:
    registry.register(bundle)
    remove(registry, Ref("jets", 1))
    assert registry.list() == []
    assert [event.title for event in registry.history("jets")] == ["removal of jets/1"]
    assert registry.register(bundle).ref == "jets/2"


@pytest.mark.parametrize(("number", "alias"), [(1, "previous"), (2, "production")])
def test_a_version_with_an_alias_is_not_removed(
    registry: Registry, promoted: list[Version], number: int, alias: str
) -> None:
    with pytest.raises(RegistryError) as caught:
        remove(registry, Ref("jets", number))
    assert str(caught.value) == f"jets/{number} is @{alias}: move that to another version first"
    assert len(registry.history("jets")) == 2
    assert registry.open(registry.find(f"jets/{number}")).digest == promoted[number - 1].digest


@pytest.mark.usefixtures("promoted")
@pytest.mark.parametrize("ref", [Ref("jets"), Ref("jets", alias="production")], ids=str)
def test_a_version_is_removed_by_its_number_only(registry: Registry, ref: Ref) -> None:
    with pytest.raises(RegistryError, match="say which version by its number, as jets/3"):
        remove(registry, ref)


@pytest.mark.usefixtures("promoted")
@pytest.mark.parametrize("ref", [Ref("jets", 9), Ref("tracks", 1)], ids=str)
def test_a_missing_version_is_not_removed(registry: Registry, ref: Ref) -> None:
    with pytest.raises(NotFoundError):
        remove(registry, ref)


@pytest.fixture
def shared(registry: Registry, promoted: list[Version]) -> Version:
    """A version whose files another version has too. MLflow's own page can make such a version."""
    client = client_of(registry)
    client.create_registered_model("copies")
    client.create_model_version("copies", promoted[2].source, run_id=promoted[2].run_id)
    return promoted[2]


@pytest.mark.usefixtures("shared")
def test_a_version_whose_files_another_one_has_is_not_removed(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="jets/3: copies/1 has the same files: remove it first"):
        remove(registry, Ref("jets", 3))


def test_files_that_another_version_has_are_not_collected(
    registry: Registry, shared: Version
) -> None:
    client_of(registry).delete_model_version("jets", "3")  # with MLflow, not with ours
    assert collect(registry) == []
    assert run_of(shared).exists()


def test_a_damaged_version_is_removed(registry: Registry, promoted: list[Version]) -> None:
    shutil.rmtree(run_of(promoted[2]) / "artifacts/bundle/targets")
    client = client_of(registry)
    client.delete_run(str(promoted[2].run_id))
    remove(registry, Ref("jets", 3))
    assert not run_of(promoted[2]).exists()


@pytest.mark.parametrize(
    ("killed_at", "states"),
    [
        ("create_run", []),
        ("delete_model_version", ["void"]),
        ("set_terminated", ["done"]),
        ("delete_run", ["done"]),
    ],
)
def test_a_removal_that_was_killed_has_happened_or_not(
    registry: Registry, promoted: list[Version], killed_at: str, states: list[str]
) -> None:
    """Killed before it writes the event, deletes the version, ends the event or deletes the run.

    `states`: what the history says of the removal, before and after the next writer.
    """
    kill_before(lambda: remove(registry, Ref("jets", 3)), killed_at)
    removed = states == ["done"]
    numbers = [version.number for version in registry.versions("jets")]
    assert numbers == ([1, 2] if removed else [1, 2, 3])
    assert run_of(promoted[2]).exists() is (killed_at != "delete_run")
    assert [event.state for event in registry.history("jets")[2:]] == states

    collected = collect(registry)
    assert [item.kind for item in collected] == (["removed version"] if removed else [])
    assert [event.state for event in registry.history("jets")[2:]] == states
    assert run_of(promoted[2]).exists() is not removed
    assert collect(registry) == []
    if not removed:
        registry.open(registry.find("jets/3"))
        remove(registry, Ref("jets", 3))


@pytest.mark.usefixtures("promoted")
@pytest.mark.parametrize("killed_at", ["create_run", "delete_model_version"])
def test_a_removal_that_has_not_happened_can_be_repeated(
    registry: Registry, killed_at: str
) -> None:
    kill_before(lambda: remove(registry, Ref("jets", 3)), killed_at)
    registry.open(registry.find("jets/3"))
    remove(registry, Ref("jets", 3))
    assert [version.number for version in registry.versions("jets")] == [1, 2]


def test_no_target_is_added_to_a_version_that_is_removed_meanwhile(
    registry: Registry, promoted: list[Version], tmp_path: Path, make_bundle: MakeBundle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The version is removed while the files of one more target are copied."""
    annex = write_annex(tmp_path / "annex", Bundle.open(make_bundle(2)), CUDA)
    upload_files = upload.upload_annex

    def upload_and_remove(*arguments: object) -> None:
        upload_files(*arguments)  # type: ignore[arg-type]
        remove(registry, Ref("jets", 3))

    monkeypatch.setattr(upload, "upload_annex", upload_and_remove)
    with pytest.raises(NotFoundError, match="jets/3: no such version"):
        registry.add_target(promoted[2], annex)
    assert [path for path in run_of(promoted[2]).rglob("*") if path.is_file()] == []
