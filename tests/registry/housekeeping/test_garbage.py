"""Files that nothing refers to are removed, but not those that somebody is writing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from registry import Bundle, BundleError, Ref, Registry, RegistryError
from registry.housekeeping import garbage
from registry.housekeeping.export_import import export_to
from registry.housekeeping.garbage import collect
from registry.store import upload
from registry.store.bundle_files import annex_place, stored_sizes
from registry.trust import sign
from tests.models import registries
from tests.models.bundles import PASSED, MakeBundle, write_annex
from tests.models.keys import make_keys
from tests.models.mlflow_server import client_of
from tests.registry.history.test_model_writer import Killed

CUDA = "cuda/sm_90"
NOW = timedelta(0)
ROOT = Path(__file__).parents[3]


def killed(*arguments: object, **more: object) -> None:
    raise Killed


def leave(registry: Registry, bundle: Bundle, at: str) -> None:
    """Leaves a killed registration, which removes none of its files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MlflowClient, at, killed)
        patch.setattr(upload, "discard", lambda *arguments: None)
        with pytest.raises(Killed):
            registry.register(bundle)


def stored_files(registry: Registry) -> list[Path]:
    root = registries.file_of(registry).parent
    return [p for p in root.rglob("*") if p.is_file() and not p.name.startswith("registry.db")]


def test_nothing(tmp_path: Path, registry: Registry) -> None:
    assert collect(registry) == []
    missing = Registry(f"sqlite:///{tmp_path}/none/registry.db")
    assert collect(missing) == []
    assert not (tmp_path / "none").exists()


def test_a_killed_import(tmp_path: Path, registry: Registry, bundle: Bundle) -> None:
    registry.register(bundle)
    export_to(registry, Ref("jets"), tmp_path / "jets.tar")
    away = Registry(f"sqlite:///{tmp_path}/away/registry.db")
    script = (
        "import os, signal, sys; from pathlib import Path; from registry import Registry\n"
        "from registry.housekeeping import export_import\n"
        "export_import.push = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "export_import.import_from(Registry(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", script, away.uri, str(tmp_path / "jets.tar")]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert collect(away) == []  # it may still be at work
    (found,) = collect(away, older_than=NOW)
    assert (found.kind, found.bytes > 10_000) == ("temporary", True)
    assert list((tmp_path / "away").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("at", "why"),
    [
        ("log_batch", "never ended"),  # the files are there, the run is not ended
        ("set_terminated", "never ended"),
        ("create_model_version", "no version refers to it"),
    ],
)
def test_a_killed_registration(registry: Registry, bundle: Bundle, at: str, why: str) -> None:
    leave(registry, bundle, at)
    size = sum(path.stat().st_size for path in stored_files(registry))
    assert collect(registry) == []  # it may still be writing
    (foreseen,) = collect(registry, older_than=NOW, dry_run=True)
    assert (foreseen.kind, foreseen.bytes) == ("registration", size)
    assert foreseen.what.startswith("jets: ")
    assert why in foreseen.what
    assert sum(path.stat().st_size for path in stored_files(registry)) == size
    assert collect(registry, older_than=NOW) == [foreseen]
    assert stored_files(registry) == []
    assert collect(registry, older_than=NOW) == []


def test_a_registration_after_a_killed_one(registry: Registry, bundle: Bundle) -> None:
    leave(registry, bundle, "create_model_version")
    assert registry.register(bundle).ref == "jets/1"
    collect(registry, older_than=NOW)
    registry.open(registry.find("jets/1")).verify()
    assert collect(registry, older_than=NOW) == []


def test_a_failed_registration(
    registry: Registry, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes its files itself; its run is left, and is collected at once."""
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", killed)
        with pytest.raises(Killed):
            registry.register(bundle)
    assert [(each.what, each.bytes) for each in collect(registry)] == [("jets: failed", 0)]
    assert collect(registry) == []


def test_a_file_that_is_written_during_the_removal_is_removed_too(
    registry: Registry, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration that was taken for abandoned goes on writing until it asks if it may."""
    leave(registry, bundle, "log_batch")
    (artifacts,) = {p.parents[1] for p in stored_files(registry) if p.name == "program.pt2"}
    late, plain = artifacts / "report.html", os.rmdir
    written: list[int] = []

    def after_a_late_file(path: str | Path, *, dir_fd: int | None = None) -> None:
        if Path(path) == artifacts and not written:
            written.append(late.write_text("just made"))
        plain(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", after_a_late_file)
    assert len(collect(registry, older_than=NOW)) == 1
    assert written
    assert stored_files(registry) == []


def test_a_registration_that_is_at_work(
    registry: Registry, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its files were collected, it makes no version of them, and says why."""
    plain = upload.upload

    def slow(*arguments: object) -> str:
        source = plain(*arguments)  # type: ignore[arg-type]
        assert len(collect(registry, older_than=NOW)) == 1
        return source

    with monkeypatch.context() as patch:
        patch.setattr(upload, "upload", slow)
        with pytest.raises(BundleError, match="`pipeline registry gc` took it for abandoned"):
            registry.register(bundle)
    assert registry.list() == []
    assert stored_files(registry) == []
    assert collect(registry, older_than=NOW) == []
    assert registry.register(bundle).ref == "jets/1"


def test_an_annex_that_was_never_finished(
    registry: Registry, bundle: Bundle, tmp_path: Path
) -> None:
    version = registry.register(bundle)
    done = write_annex(tmp_path / "done", bundle, "cpu/x86-64-v4")
    registry.add_target(version, done)
    left = write_annex(tmp_path / "left", bundle, CUDA)
    with registry.client(write=True) as client:
        upload.upload_annex(client, str(version.run_id), left)
    assert collect(registry) == []
    (found,) = collect(registry, older_than=NOW)
    assert found.kind == "annex"
    assert found.where.endswith(annex_place(CUDA, left.digest))
    assert found.bytes == sum(p.stat().st_size for p in left.path.rglob("*") if p.is_file())
    assert collect(registry, older_than=NOW) == []
    registry.open(registry.find("jets/1")).verify()
    assert registry.add_target(version, left).annexes.keys() == {CUDA, "cpu/x86-64-v4"}


def test_an_annex_that_is_being_written(
    registry: Registry, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = registry.register(bundle)
    annex, plain = write_annex(tmp_path / "annex", bundle, CUDA), upload.upload_annex

    def slow(*arguments: object) -> None:
        plain(*arguments)  # type: ignore[arg-type]
        assert len(collect(registry, older_than=NOW)) == 1

    with monkeypatch.context() as patch:
        patch.setattr(upload, "upload_annex", slow)
        with pytest.raises(RegistryError, match="`pipeline registry gc` took it for abandoned"):
            registry.add_target(version, annex)
    assert registry.find("jets/1").annexes == {}
    assert list(registry.history("jets")) == []
    assert registry.add_target(version, annex).annexes == {CUDA: annex.digest}


def test_what_versions_have_stays(
    registry: Registry, make_bundle: MakeBundle, bundle: Bundle, tmp_path: Path
) -> None:
    """Versions with aliases and without, signed, promoted, of several models; and others' runs."""
    for seed in range(3):
        made = registry.register(Bundle.open(make_bundle(seed)))
    registry.promote(made, "production", PASSED)
    other = registry.register(bundle, "other")
    registry.sign(other, make_keys(tmp_path, "release").private)
    client = client_of(registry)
    theirs = client.create_run(client.create_experiment("training"), tags={"digest": "abc"})
    client.create_run(client.create_experiment("soa-pipeline policy"), tags={"digest": "abc"})
    client.rename_registered_model("other", "renamed")
    client.delete_run(str(made.run_id))  # deleted in MLflow's page; the version exists
    before = sorted(stored_files(registry))
    assert collect(registry, older_than=NOW) == []
    assert sorted(stored_files(registry)) == before
    assert client.get_run(theirs.info.run_id).info.lifecycle_stage == "active"


def test_the_files_of_a_version_that_was_deleted_in_mlflow_are_garbage(
    registry: Registry, bundle: Bundle
) -> None:
    registry.register(bundle)
    client_of(registry).delete_model_version("jets", "1")
    assert collect(registry) == []  # it may still be at work
    (found,) = collect(registry, older_than=NOW)
    assert (found.kind, found.what) == ("registration", "jets: no version refers to it")
    assert stored_files(registry) == []


def test_what_killed_processes_leave(registry: Registry, bundle: Bundle, tmp_path: Path) -> None:
    cache = tmp_path / "own cache"
    version = registry.register(bundle)
    folder = registries.folder_of(version)
    left = [
        cache / ".0123.89abcdef.partial",
        cache / "built/0123/cpu/.key.89abcdef.old",
        folder.parent / ".bundle.89abcdef.sig",
        folder.parent / ".artifact.uploading.ab_d3f4h",  # of MLflow, for a report
        registries.file_of(registry).with_name(".registry.db.89abcdef.partial"),
    ]
    for path in left[:2]:
        shutil.copytree(bundle.path, path)
    for path in left[2:]:
        path.write_bytes(b"1234")
    shutil.copytree(bundle.path, cache / bundle.digest)
    beside = cache / "built/0123/cpu/.key.lock"
    beside.touch()
    sign(bundle, make_keys(tmp_path, "release").private)
    assert collect(registry, cache=cache) == []
    found = collect(registry, older_than=NOW, cache=cache)
    assert sorted(each.where for each in found) == sorted(map(str, left))
    size = sum(p.stat().st_size for p in (cache / bundle.digest).rglob("*") if p.is_file())
    assert sum(each.bytes for each in found) == 2 * size + 12
    assert not any(path.exists() for path in left)
    assert beside.exists()
    registry.open(version).verify()
    assert Bundle.open(cache / bundle.digest).digest == bundle.digest


def test_files_that_others_finish_meanwhile(registry: Registry, tmp_path: Path) -> None:
    """A temporary folder is renamed when it is complete; a collector may have listed it before."""
    (tmp_path / "cache").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"cache/.{name}.89abcdef.partial").mkdir()
    listed = garbage._temporary(registry, [], tmp_path / "cache", datetime.now(UTC))
    first = next(listed)
    for other in (tmp_path / "cache").iterdir():
        if other != first:
            other.rename(tmp_path / "complete")
    assert list(listed) == []


def test_a_file_that_others_remove_meanwhile_has_no_size(
    registry: Registry, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "walk", lambda root: [(root, [], ["manifest.json", "removed"])])
    size = (bundle.path / "manifest.json").stat().st_size
    assert stored_sizes(registry, str(bundle.path)) == {"manifest.json": size}
