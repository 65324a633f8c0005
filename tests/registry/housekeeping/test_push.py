"""A pulled folder is pushed: completely, once, and without the other registry's decisions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from registry import Bundle, BundleError, Registry, RegistryError, Version
from registry.bundle.pulled import PulledNote, write_note
from registry.housekeeping.pushing import push
from registry.trust import read_trusted, require_signature, sign
from tests.models import registries
from tests.models.bundles import PASSED, V3, made_bundle, write_annex
from tests.models.keys import KeyPair, make_keys
from tests.models.mlflow_server import client_of
from tests.models.shared import made_once
from tests.registry.history.test_model_writer import Killed

V4, CUDA = "cpu/x86-64-v4", "cuda/sm_90"


@pytest.fixture(scope="module")
def other_site(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    """A folder with a registry, `store`, and its version to which a target was added, `pulled`."""

    def make(folder: Path) -> None:
        registries.copy(empty_database.parent, folder / "store")
        registry = Registry(f"sqlite:///{folder}/store/registry.db")
        bundle = made_bundle(folder / "bundle")
        version = registry.add_target(
            registry.register(bundle), write_annex(folder / "annex", bundle, V4, seed=1)
        )
        version = registry.promote(version, "production", PASSED, annexes=[V4])
        record = version.promotion("production")
        assert record is not None
        registry.fetch(version, folder / "pulled")
        note = PulledNote(version.ref, version.digest, record.by, record.at, dict(record.annexes))
        write_note(folder / "pulled", note)

    return made_once(tmp_path_factory, "store-to-pull", make)


@pytest.fixture
def pulled(away: Registry, other_site: Path, tmp_path: Path) -> Path:
    """A folder pulled from `away`."""
    registries.copy(other_site / "store", registries.file_of(away).parent)
    return Path(shutil.copytree(other_site / "pulled", tmp_path / "pulled"))


def files_of(version: Version) -> set[str]:
    folder = registries.folder_of(version)
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_becomes_a_version(registry: Registry, pulled: Path, bundle: Bundle) -> None:
    pushed = push(registry, pulled)
    version = pushed.version
    assert (pushed.new, pushed.added, pushed.kept, pushed.signature) == (True, (), (), "none")
    assert (version.ref, version.digest) == ("jets/1", bundle.digest)
    assert version.targets == {V3: "verified", V4: "verified"}
    assert version.chosen[V4] == "aoti"


def test_the_files_of_bundle_and_annex_are_pushed(
    registry: Registry, pulled: Path, bundle: Bundle
) -> None:
    version = push(registry, pulled).version
    library = registry.open(version).file(f"annexes/{V4}/aoti/model.so")
    assert library.read_bytes() == (pulled / f"annexes/{V4}/aoti/model.so").read_bytes()
    assert files_of(version) == {*bundle.files, "SHA256SUMS"}  # the note is left out


def test_the_other_registrys_decisions_are_not_taken_over(registry: Registry, pulled: Path) -> None:
    version = push(registry, pulled).version
    assert version.aliases == ()
    assert version.promotion("production") is None
    assert list(registry.history("jets")) == []


def test_the_origin_of_a_pushed_version_is_recorded(registry: Registry, pulled: Path) -> None:
    origin = push(registry, pulled).version.origin
    assert origin["version"] == "jets/1"
    assert origin.keys() == {"pushed_by", "pushed_at", "version", "promoted_by", "promoted_at"}


def test_a_second_push_makes_no_version(registry: Registry, pulled: Path) -> None:
    first = push(registry, pulled).version
    second = push(registry, pulled)
    assert (second.version, second.new) == (first, False)
    assert len(registry.versions("jets")) == 1


def test_a_push_to_where_it_was_pulled_from_makes_no_version(away: Registry, pulled: Path) -> None:
    assert push(away, pulled).version.aliases == ("production",)
    assert len(away.versions("jets")) == 1


def test_a_folder_is_pushed_under_another_name(registry: Registry, pulled: Path) -> None:
    assert push(registry, pulled, "other").version.ref == "other/1"
    assert push(registry, pulled).version.ref == "other/1"  # no second version is made


def test_a_name_decides_between_versions_of_one_bundle(registry: Registry, pulled: Path) -> None:
    push(registry, pulled, "other")
    assert push(registry, pulled, "jets").version.ref == "jets/1"
    assert push(registry, pulled).version.ref == "jets/1"  # the bundle's own name comes first


def test_a_name_that_no_model_may_have_is_refused(registry: Registry, pulled: Path) -> None:
    with pytest.raises(RegistryError, match="is not a version"):
        push(registry, pulled, "a/b")


def test_a_model_of_others_with_our_tags_is_left_alone(
    registry: Registry, pulled: Path, bundle: Bundle
) -> None:
    """Its name may be none that we could use."""
    client = client_of(registry)
    client.create_registered_model("a model")
    client.create_model_version("a model", "/nowhere", tags={"digest": bundle.digest})
    assert push(registry, pulled).version.ref == "jets/1"


def test_a_version_gets_the_targets_that_it_lacks(
    registry: Registry, bundle: Bundle, pulled: Path
) -> None:
    registry.register(bundle)
    write_annex(pulled / "annexes" / CUDA, bundle, CUDA)
    pushed = push(registry, pulled)
    assert (pushed.new, pushed.added) == (False, (V4, CUDA))
    assert pushed.version.annexes.keys() == {V4, CUDA}
    assert [event.title for event in registry.history("jets")] == [
        f"build of {V4} for jets/1",
        f"build of {CUDA} for jets/1",
    ]


def test_a_version_keeps_its_own_build_of_a_target(
    registry: Registry, bundle: Bundle, pulled: Path, tmp_path: Path
) -> None:
    own = write_annex(tmp_path / "own", bundle, V4, seed=2)
    before = registry.add_target(registry.register(bundle), own)
    pushed = push(registry, pulled)
    assert (pushed.version, pushed.kept) == (before, (V4,))


@pytest.fixture
def release(pulled: Path, tmp_path: Path) -> KeyPair:
    """The key with which the pulled folder was signed."""
    keys = make_keys(tmp_path, "release")
    sign(Bundle.open(pulled), keys.private)
    return keys


def test_a_signature_is_pushed_to_a_version_without_one(
    registry: Registry, bundle: Bundle, pulled: Path, release: KeyPair
) -> None:
    """A pulled folder is signed where the key is, and its signature pushed back to its version."""
    version, key = registry.register(bundle), read_trusted(release.public)
    for _ in range(2):
        assert push(registry, pulled).signature == "carried"
        assert registry.require_signature(version, registry.open(version), [key]) == key
    folder = registries.folder_of(version)
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_a_version_keeps_its_own_signature(
    registry: Registry, pulled: Path, release: KeyPair, tmp_path: Path
) -> None:
    version, key = push(registry, pulled).version, read_trusted(release.public)
    sign(Bundle.open(pulled), make_keys(tmp_path, "other").private)
    assert push(registry, pulled).signature == "kept"
    assert registry.require_signature(version, registry.open(version), [key]) == key


def test_a_new_version_has_the_signature_of_the_folder(
    registry: Registry, pulled: Path, release: KeyPair
) -> None:
    key = read_trusted(release.public)
    new = push(registry, pulled, "new").version
    assert require_signature(registry.open(new), [key]) == key


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("program.pt2", "is truncated or altered"),
        (f"annexes/{V4}/aoti/model.so", "is truncated or altered"),
        ("more", "more does not belong to the bundle"),
    ],
)
def test_a_damaged_folder_makes_no_version(
    registry: Registry, pulled: Path, name: str, message: str
) -> None:
    (pulled / name).write_bytes(b"other")
    with pytest.raises(BundleError, match=message):
        push(registry, pulled)
    assert registry.list() == []


def test_a_damaged_folder_is_refused_although_its_version_is_there(
    registry: Registry, pulled: Path
) -> None:
    push(registry, pulled)
    (pulled / "program.pt2").write_bytes(b"other")
    with pytest.raises(BundleError, match=r"program\.pt2 is truncated or altered"):
        push(registry, pulled)


def test_a_folder_with_the_note_of_another_bundle_is_refused(
    registry: Registry, pulled: Path
) -> None:
    write_note(pulled, PulledNote("jets/7", "0" * 64, "ada", "2026-01-01T00:00:00+00:00"))
    with pytest.raises(RegistryError, match=r"its note of promotion is of another bundle \(jets/7"):
        push(registry, pulled)
    assert registry.list() == []


def test_a_push_that_was_killed_at_its_last_call_makes_no_version(
    registry: Registry, pulled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bundle and annexes become visible in one step, or not at all."""

    def be_killed(*arguments: Any, **options: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(MlflowClient, "create_model_version", be_killed)
        push(registry, pulled)
    assert registry.list() == []
    assert push(registry, pulled).version.annexes.keys() == {V4}
