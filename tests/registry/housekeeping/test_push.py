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
from tests.models.keys import make_keys
from tests.models.mlflow_server import client_of
from tests.models.shared import made_once
from tests.registry.history.test_model_writer import Killed

V4, CUDA = "cpu/x86-64-v4", "cuda/sm_90"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    """A registry in `store`; its promoted version, to which a target was added, is pulled."""

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
def pulled(away: Registry, made: Path, tmp_path: Path) -> Path:
    """A folder pulled from `away`."""
    registries.copy(made / "store", registries.file_of(away).parent)
    return Path(shutil.copytree(made / "pulled", tmp_path / "pulled"))


def files_of(version: Version) -> set[str]:
    folder = registries.folder_of(version)
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_becomes_a_version(registry: Registry, pulled: Path, bundle: Bundle) -> None:
    done = push(registry, pulled)
    version = done.version
    assert (done.new, done.added, done.kept, done.signature) == (True, (), (), "none")
    assert (version.ref, version.digest) == ("jets/1", bundle.digest)
    assert version.targets == {V3: "verified", V4: "verified"}
    assert version.chosen[V4] == "aoti"
    opened = registry.open(version)
    assert opened.file(f"annexes/{V4}/aoti/model.so").stat().st_size == 5000
    assert files_of(version) == {*bundle.files, "SHA256SUMS"}  # the note is left out


def test_the_other_registrys_decisions_are_not_taken_over(registry: Registry, pulled: Path) -> None:
    version = push(registry, pulled).version
    assert version.aliases == ()
    assert version.promotion("production") is None
    assert list(registry.history("jets")) == []
    origin = version.origin
    assert origin["version"] == "jets/1"
    assert origin.keys() == {"pushed_by", "pushed_at", "version", "promoted_by", "promoted_at"}


def test_what_is_there_already(registry: Registry, away: Registry, pulled: Path) -> None:
    first = push(registry, pulled).version
    again = push(registry, pulled)
    assert (again.version, again.new) == (first, False)
    assert len(registry.versions("jets")) == 1
    assert push(away, pulled).version.aliases == ("production",)
    assert len(away.versions("jets")) == 1


def test_another_name(registry: Registry, pulled: Path) -> None:
    assert push(registry, pulled, "other").version.ref == "other/1"
    assert push(registry, pulled).version.ref == "other/1"  # no second version is made
    assert push(registry, pulled, "jets").version.ref == "jets/1"
    assert push(registry, pulled).version.ref == "jets/1"
    with pytest.raises(RegistryError, match="is not a version"):
        push(registry, pulled, "a/b")


def test_a_model_of_others_with_our_tags(registry: Registry, pulled: Path, bundle: Bundle) -> None:
    """Its name may be none that we could use."""
    client = client_of(registry)
    client.create_registered_model("a model")
    client.create_model_version("a model", "/nowhere", tags={"digest": bundle.digest})
    assert push(registry, pulled).version.ref == "jets/1"


def test_it_gets_what_it_lacks(registry: Registry, bundle: Bundle, pulled: Path) -> None:
    registry.register(bundle)
    write_annex(pulled / "annexes" / CUDA, bundle, CUDA)
    done = push(registry, pulled)
    assert (done.new, done.added) == (False, (V4, CUDA))
    assert done.version.annexes.keys() == {V4, CUDA}
    assert [event.title for event in registry.history("jets")] == [
        f"build of {V4} for jets/1",
        f"build of {CUDA} for jets/1",
    ]


def test_another_build_stays(
    registry: Registry, bundle: Bundle, pulled: Path, tmp_path: Path
) -> None:
    own = write_annex(tmp_path / "own", bundle, V4, seed=2)
    before = registry.add_target(registry.register(bundle), own)
    done = push(registry, pulled)
    assert (done.version, done.kept) == (before, (V4,))


def test_the_signature_comes_along(
    registry: Registry, bundle: Bundle, pulled: Path, tmp_path: Path
) -> None:
    """A pulled folder is signed where the key is, and its signature pushed back to its version."""
    release, other = make_keys(tmp_path, "release"), make_keys(tmp_path, "other")
    keys = [read_trusted(release.public)]
    version = registry.register(bundle)
    sign(Bundle.open(pulled), release.private)
    assert push(registry, pulled).signature == "carried"
    assert registry.require_signature(version, registry.open(version), keys) == keys[0]
    assert push(registry, pulled).signature == "carried"
    sign(Bundle.open(pulled), other.private)
    assert push(registry, pulled).signature == "kept"
    assert registry.require_signature(version, registry.open(version), keys) == keys[0]
    new = push(registry, pulled, "new").version
    require_signature(registry.open(new), [read_trusted(other.public)])
    folder = registries.folder_of(version)
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("program.pt2", "is truncated or altered"),
        (f"annexes/{V4}/aoti/model.so", "is truncated or altered"),
        ("more", "more does not belong to the bundle"),
    ],
)
def test_a_damaged_folder_makes_no_version(
    registry: Registry, pulled: Path, name: str, says: str
) -> None:
    (pulled / name).write_bytes(b"other")
    with pytest.raises(BundleError, match=says):
        push(registry, pulled)
    assert registry.list() == []


def test_a_damaged_folder_is_refused_although_its_version_is_there(
    registry: Registry, pulled: Path
) -> None:
    push(registry, pulled)
    (pulled / "program.pt2").write_bytes(b"other")
    with pytest.raises(BundleError, match=r"program\.pt2 is truncated or altered"):
        push(registry, pulled)


def test_a_note_of_another_bundle(registry: Registry, pulled: Path) -> None:
    write_note(pulled, PulledNote("jets/7", "0" * 64, "ada", "2026-01-01T00:00:00+00:00"))
    with pytest.raises(RegistryError, match=r"its note of promotion is of another bundle \(jets/7"):
        push(registry, pulled)
    assert registry.list() == []


def test_broken_off_at_the_last_moment(
    registry: Registry, pulled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bundle and annexes become visible in one step, or not at all."""

    def broken(*arguments: Any, **more: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(MlflowClient, "create_model_version", broken)
        push(registry, pulled)
    assert registry.list() == []
    assert push(registry, pulled).version.annexes.keys() == {V4}
