"""The registry behind MLflow's own tracking server, which then also keeps the files."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from registry import Bundle, BundleError, NotFoundError, Ref, Registry, RegistryError, TrustError
from registry.housekeeping.garbage import collect
from registry.housekeeping.pushing import push
from registry.housekeeping.removal import remove
from registry.store import upload
from registry.trust import read_trusted, require_signature, sign
from tests.models.bundles import PASSED, MakeBundle, write_annex
from tests.models.keys import make_keys
from tests.models.mlflow_server import served_here

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flask") is None, reason="the server comes with the mlflow extra"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[str]:
    with served_here(tmp_path_factory.mktemp("server"), empty_database) as uri:
        yield uri


def test_a_server_without_models_has_none_to_find(tmp_path: Path, empty_database: Path) -> None:
    with served_here(tmp_path, empty_database) as uri:
        assert Registry(uri).list() == []
        with pytest.raises(NotFoundError, match="its models: none"):
            Registry(uri).find("jets")


def test_versions_are_promoted_behind_a_server(server: str, make_bundle: MakeBundle) -> None:
    registry = Registry(server)
    bundles = [Bundle.open(make_bundle(seed=seed)) for seed in (0, 1, 0)]
    first, second, again = (registry.register(bundle, "promoted") for bundle in bundles)
    assert again == first
    for version in (first, second):
        registry.promote(version, "production", PASSED)
    assert registry.rollback("promoted").ref == "promoted/1"
    (model,) = (model for model in registry.list() if model.name == "promoted")
    assert model.aliases == {"production": 1, "previous": 2}
    record = registry.find("promoted@production").promotion("production")
    assert record is not None and record.decisions == PASSED
    with pytest.raises(NotFoundError, match="there are: 1-2"):
        registry.find("promoted/9")


def test_files_of_a_server_are_kept_in_the_cache(
    server: str, make_bundle: MakeBundle, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    registry, bundle = Registry(server), Bundle.open(make_bundle(seed=2))
    version = registry.register(bundle, "kept-here")
    assert version.source.startswith("mlflow-artifacts:")
    assert registry.local_path(version) is None
    assert registry.fetch(version, tmp_path / "copy").digest == bundle.digest
    opened = registry.open(version)
    assert opened.path == tmp_path / "cache" / "soa-pipeline" / bundle.digest
    assert registry.open(version) == opened
    assert registry.open(version, cache=tmp_path / "other").path.parent == tmp_path / "other"
    assert capfd.readouterr() == ("", "")  # without the bars of MLflow


def test_a_damaged_copy_is_fetched_again_from_a_server(
    server: str, make_bundle: MakeBundle
) -> None:
    registry, bundle = Registry(server), Bundle.open(make_bundle(seed=3))
    version = registry.register(bundle, "damaged")
    copy = registry.open(version)
    (copy.path / "program.pt2").write_bytes(b"other")
    with pytest.raises(BundleError, match=r"program\.pt2 is truncated or altered"):
        registry.open(version, fetch=False)
    assert registry.open(version) == copy
    assert (copy.path / "program.pt2").read_bytes() == bundle.file("program.pt2").read_bytes()


def test_a_target_is_added_behind_a_server(
    server: str, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    registry, bundle = Registry(server), Bundle.open(make_bundle(seed=5))
    version = registry.register(bundle, "later")
    first, second = (
        write_annex(tmp_path / str(seed), bundle, "cuda/sm_90", seed) for seed in (1, 2)
    )
    extended = registry.add_target(version, first)
    with pytest.raises(RegistryError, match="later/1 has cuda/sm_90 already: built later"):
        registry.add_target(version, second)  # looked up before the first was added
    with registry.client() as client:
        stored = client.list_artifacts(str(version.run_id), "annexes/cuda.sm_90")
    assert [Path(item.path).name for item in stored if item.is_dir] == [first.digest]

    opened = registry.open(extended)
    cached = tmp_path / "cache" / "soa-pipeline" / first.digest / "aoti" / "model.so"
    assert opened.file("annexes/cuda/sm_90/aoti/model.so") == cached
    assert registry.fetch(extended, tmp_path / "copy").manifest == opened.manifest


def test_a_version_is_signed_behind_a_server(
    server: str, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    """The signature is stored, and is added to a cache that already has the files."""
    registry = Registry(server)
    version = registry.register(Bundle.open(make_bundle(seed=7)), "signed")
    release = make_keys(tmp_path, "release")
    key = read_trusted(release.public)
    cached = registry.open(version, cache=tmp_path / "cached before")
    with pytest.raises(TrustError, match="not signed"):
        registry.require_signature(version, cached, [key])
    registry.sign(version, release.private)
    assert registry.require_signature(version, cached, [key]) == key
    assert require_signature(registry.fetch(version, tmp_path / "fetched"), [key]) == key


def test_a_signature_is_replaced_behind_a_server(
    server: str, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    registry = Registry(server)
    version = registry.register(Bundle.open(make_bundle(seed=8)), "signed-twice")
    registry.sign(version, make_keys(tmp_path, "release").private)
    fetched = registry.fetch(version, tmp_path / "fetched")
    other = make_keys(tmp_path, "other")
    registry.sign(version, other.private)
    key = read_trusted(other.public)
    assert registry.require_signature(version, fetched, [key]) == key


def folder_with_an_annex(bundle: Bundle, folder: Path) -> Path:
    """A copy of the bundle with one more target, to be pushed."""
    shutil.copytree(bundle.path, folder)
    write_annex(folder / "annexes/cuda/sm_90", bundle, "cuda/sm_90")
    return folder


@pytest.mark.long
def test_a_folder_is_pushed_to_a_server(
    server: str, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    registry = Registry(server)
    release = make_keys(tmp_path, "release")
    folder = folder_with_an_annex(Bundle.open(make_bundle(seed=11)), tmp_path / "folder")
    version = push(registry, folder, "pushed").version
    assert version.annexes.keys() == {"cuda/sm_90"}
    sign(Bundle.open(folder), release.private)
    assert push(registry, folder, "pushed").signature == "carried"
    assert push(registry, folder, "pushed").signature == "carried"
    fetched = registry.fetch(version, tmp_path / "fetched")
    require_signature(fetched, [read_trusted(release.public)])
    assert fetched.annexes.keys() == {"cuda/sm_90"}


@pytest.mark.long
def test_a_version_is_removed_from_a_server(
    server: str, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    registry = Registry(server)
    folder = folder_with_an_annex(Bundle.open(make_bundle(seed=13)), tmp_path / "folder")
    push(registry, folder, "kept")  # another version with the same bundle
    version = push(registry, folder, "removed").version
    assert remove(registry, Ref("removed", 1), "a trial").bytes > 30_000  # files of 5000 bytes
    with registry.client() as client:
        assert client.list_artifacts(str(version.run_id)) == []
    registry.open(registry.find("kept/1"), cache=tmp_path / "new").verify()


def be_killed(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.long
def test_unfinished_files_on_a_server_are_collected(
    server: str, make_bundle: MakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a registration and of an annex whose processes were killed."""
    registry, now = Registry(server), timedelta(0)
    bundle = Bundle.open(make_bundle(seed=14))
    folder = folder_with_an_annex(bundle, tmp_path / "folder")
    version = push(registry, folder, "collected").version
    unfinished = write_annex(tmp_path / "unfinished", bundle, "rocm/gfx90a")
    with registry.client(write=True) as client:
        upload.upload_annex(client, str(version.run_id), unfinished)
    with monkeypatch.context() as patch:
        patch.setattr(upload, "require_open", be_killed)
        patch.setattr(upload, "discard", lambda *arguments: None)
        with pytest.raises(KeyboardInterrupt):
            registry.register(Bundle.open(make_bundle(seed=12)), "never")
    assert collect(registry) == []  # they may still be at work
    foreseen = collect(registry, older_than=now, dry_run=True)
    assert sorted(item.kind for item in foreseen) == ["annex", "registration"]
    assert all(item.bytes > 5000 for item in foreseen)
    assert collect(registry, older_than=now) == foreseen
    assert collect(registry, older_than=now) == []
    registry.open(registry.find("collected/1"), cache=tmp_path / "new").verify()
    assert registry.add_target(version, unfinished).annexes.keys() == {"cuda/sm_90", "rocm/gfx90a"}
