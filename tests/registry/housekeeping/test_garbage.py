"""Files that nothing refers to are removed, but not those that somebody is writing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from registry import Bundle, BundleError, Ref, Registry, RegistryError
from registry.housekeeping.export_import import export_to
from registry.housekeeping.garbage import collect
from registry.store import bundle_files, upload
from registry.store.bundle_files import annex_path, stored_sizes
from registry.trust import sign
from tests.models import registries
from tests.models.bundles import PASSED, MakeBundle, write_annex
from tests.models.keys import make_keys
from tests.models.mlflow_server import client_of
from tests.registry.history.test_model_writer import Killed

CUDA = "cuda/sm_90"
NOW = timedelta(0)
ROOT = Path(__file__).parents[3]


def be_killed(*arguments: object, **options: object) -> None:
    raise Killed


def leave_registration(registry: Registry, bundle: Bundle, killed_at: str) -> None:
    """Leaves a registration that was killed at a call of MLflow: it removes none of its files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MlflowClient, killed_at, be_killed)
        patch.setattr(upload, "discard", lambda *arguments: None)
        with pytest.raises(Killed):
            registry.register(bundle)


def stored_files(registry: Registry) -> list[Path]:
    root = registries.file_of(registry).parent
    return [p for p in root.rglob("*") if p.is_file() and not p.name.startswith("registry.db")]


def test_an_empty_registry_has_no_garbage(registry: Registry) -> None:
    assert collect(registry) == []


def test_a_registry_that_does_not_exist_has_no_garbage_and_is_not_made(tmp_path: Path) -> None:
    missing = Registry(f"sqlite:///{tmp_path}/none/registry.db")
    assert collect(missing) == []
    assert not (tmp_path / "none").exists()


def test_what_a_killed_import_leaves_is_collected(
    tmp_path: Path, registry: Registry, bundle: Bundle
) -> None:
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
    (unpacked,) = collect(away, older_than=NOW)
    assert unpacked.kind == "temporary"
    assert unpacked.bytes > 10_000  # several files of 5000 bytes
    assert list((tmp_path / "away").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("killed_at", "reason"),
    [
        ("log_batch", "never ended"),  # the files are there, the run is not ended
        ("set_terminated", "never ended"),
        ("create_model_version", "no version refers to it"),
    ],
)
def test_a_killed_registration_is_collected(
    registry: Registry, bundle: Bundle, killed_at: str, reason: str
) -> None:
    leave_registration(registry, bundle, killed_at)
    size = sum(path.stat().st_size for path in stored_files(registry))
    assert collect(registry) == []  # it may still be writing
    (foreseen,) = collect(registry, older_than=NOW, dry_run=True)
    assert (foreseen.kind, foreseen.bytes) == ("registration", size)
    assert foreseen.what.startswith("jets: ")
    assert reason in foreseen.what
    assert sum(path.stat().st_size for path in stored_files(registry)) == size
    assert collect(registry, older_than=NOW) == [foreseen]
    assert stored_files(registry) == []
    assert collect(registry, older_than=NOW) == []


def test_a_registration_after_a_killed_one_is_not_collected(
    registry: Registry, bundle: Bundle
) -> None:
    leave_registration(registry, bundle, "create_model_version")
    assert registry.register(bundle).ref == "jets/1"
    collect(registry, older_than=NOW)
    registry.open(registry.find("jets/1")).verify()
    assert collect(registry, older_than=NOW) == []


def test_a_failed_registration_is_collected_at_once(
    registry: Registry, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes its files itself; only its run is left."""
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", be_killed)
        with pytest.raises(Killed):
            registry.register(bundle)
    assert [(item.what, item.bytes) for item in collect(registry)] == [("jets: failed", 0)]
    assert collect(registry) == []


def test_a_file_that_is_written_during_the_removal_is_removed_too(
    registry: Registry, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration that was taken for abandoned goes on writing until it asks if it may."""
    leave_registration(registry, bundle, "log_batch")
    (artifacts,) = {p.parents[1] for p in stored_files(registry) if p.name == "program.pt2"}
    rmdir = os.rmdir
    late_files: list[Path] = []

    def rmdir_after_a_late_file(path: str | Path, *, dir_fd: int | None = None) -> None:
        if Path(path) == artifacts and not late_files:
            late_files.append(artifacts / "report.html")
            late_files[0].write_text("just made")
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", rmdir_after_a_late_file)
    assert len(collect(registry, older_than=NOW)) == 1
    assert late_files
    assert stored_files(registry) == []


def test_a_registration_whose_files_were_collected_makes_no_version(
    registry: Registry, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its files were collected, it makes no version of them, and says why."""
    upload_files = upload.upload

    def upload_and_collect(*arguments: object) -> str:
        source = upload_files(*arguments)  # type: ignore[arg-type]
        assert len(collect(registry, older_than=NOW)) == 1
        return source

    with monkeypatch.context() as patch:
        patch.setattr(upload, "upload", upload_and_collect)
        with pytest.raises(BundleError, match="`pipeline registry gc` took it for abandoned"):
            registry.register(bundle)
    assert registry.list() == []
    assert stored_files(registry) == []
    assert collect(registry, older_than=NOW) == []
    assert registry.register(bundle).ref == "jets/1"


def test_an_annex_that_was_never_finished_is_collected(
    registry: Registry, bundle: Bundle, tmp_path: Path
) -> None:
    version = registry.register(bundle)
    added = write_annex(tmp_path / "added", bundle, "cpu/x86-64-v4")
    registry.add_target(version, added)
    unfinished = write_annex(tmp_path / "unfinished", bundle, CUDA)
    with registry.client(write=True) as client:
        upload.upload_annex(client, str(version.run_id), unfinished)
    assert collect(registry) == []  # it may still be at work
    (item,) = collect(registry, older_than=NOW)
    assert item.kind == "annex"
    assert item.where.endswith(annex_path(CUDA, unfinished.digest))
    assert item.bytes == sum(p.stat().st_size for p in unfinished.path.rglob("*") if p.is_file())
    assert collect(registry, older_than=NOW) == []
    registry.open(registry.find("jets/1")).verify()
    assert registry.add_target(version, unfinished).annexes.keys() == {CUDA, "cpu/x86-64-v4"}


def test_an_annex_that_is_collected_while_it_is_written_is_not_added(
    registry: Registry, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = registry.register(bundle)
    annex, upload_files = write_annex(tmp_path / "annex", bundle, CUDA), upload.upload_annex

    def upload_and_collect(*arguments: object) -> None:
        upload_files(*arguments)  # type: ignore[arg-type]
        assert len(collect(registry, older_than=NOW)) == 1

    with monkeypatch.context() as patch:
        patch.setattr(upload, "upload_annex", upload_and_collect)
        with pytest.raises(RegistryError, match="`pipeline registry gc` took it for abandoned"):
            registry.add_target(version, annex)
    assert registry.find("jets/1").annexes == {}
    assert list(registry.history("jets")) == []
    assert registry.add_target(version, annex).annexes == {CUDA: annex.digest}


def test_files_of_versions_and_runs_of_others_are_not_collected(
    registry: Registry, make_bundle: MakeBundle, bundle: Bundle, tmp_path: Path
) -> None:
    """Versions with aliases and without, signed, promoted, of several models; and others' runs."""
    versions = [registry.register(Bundle.open(make_bundle(seed))) for seed in range(3)]
    registry.promote(versions[2], "production", PASSED)
    other = registry.register(bundle, "other")
    registry.sign(other, make_keys(tmp_path, "release").private)
    client = client_of(registry)
    theirs = client.create_run(client.create_experiment("training"), tags={"digest": "abc"})
    client.create_run(client.create_experiment("soa-pipeline policy"), tags={"digest": "abc"})
    client.rename_registered_model("other", "renamed")
    client.delete_run(str(versions[2].run_id))  # deleted in MLflow's page; the version exists
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
    (item,) = collect(registry, older_than=NOW)
    assert (item.kind, item.what) == ("registration", "jets: no version refers to it")
    assert stored_files(registry) == []


def test_temporary_files_of_killed_processes_are_collected(
    registry: Registry, bundle: Bundle, tmp_path: Path
) -> None:
    cache = tmp_path / "own cache"
    version = registry.register(bundle)
    folder = registries.folder_of(version)
    folders = [
        cache / ".0123.89abcdef.partial",
        cache / "built/0123/cpu/.key.89abcdef.old",
    ]
    files = [
        folder.parent / ".bundle.89abcdef.sig",
        folder.parent / ".artifact.uploading.ab_d3f4h",  # of MLflow, for a report
        registries.file_of(registry).with_name(".registry.db.89abcdef.partial"),
    ]
    for path in folders:
        shutil.copytree(bundle.path, path)
    for path in files:
        path.write_bytes(b"1234")
    shutil.copytree(bundle.path, cache / bundle.digest)
    lock = cache / "built/0123/cpu/.key.lock"
    lock.touch()
    sign(bundle, make_keys(tmp_path, "release").private)
    assert collect(registry, cache=cache) == []  # they may still be at work
    collected = collect(registry, older_than=NOW, cache=cache)
    assert sorted(item.where for item in collected) == sorted(map(str, [*folders, *files]))
    size = sum(p.stat().st_size for p in (cache / bundle.digest).rglob("*") if p.is_file())
    assert sum(item.bytes for item in collected) == 2 * size + 3 * len(b"1234")
    assert not any(path.exists() for path in [*folders, *files])
    assert lock.exists()
    registry.open(version).verify()
    assert Bundle.open(cache / bundle.digest).digest == bundle.digest


def test_a_temporary_folder_that_is_completed_meanwhile_is_not_collected(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary folder is renamed when it is complete; a collector may have listed it before."""
    cache, remove_tree = tmp_path / "cache", bundle_files.remove_tree
    for name in ("a", "b"):
        (cache / f".{name}.89abcdef.partial").mkdir(parents=True)

    def remove_and_complete_the_other(folder: Path) -> None:
        remove_tree(folder)
        (other,) = cache.iterdir()
        other.rename(tmp_path / "complete")

    monkeypatch.setattr(bundle_files, "remove_tree", remove_and_complete_the_other)
    assert len(collect(registry, older_than=NOW, cache=cache)) == 1
    assert (tmp_path / "complete").is_dir()


def test_a_file_that_others_remove_meanwhile_has_no_size(
    registry: Registry, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "walk", lambda root: [(root, [], ["manifest.json", "removed"])])
    size = (bundle.path / "manifest.json").stat().st_size
    assert stored_sizes(registry, str(bundle.path)) == {"manifest.json": size}
