"""Locked, unreachable, broken or missing registries give one clear line, without a long wait."""

from __future__ import annotations

import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from registry import Bundle, NoRegistryError, Registry, RegistryError, RegistryUnavailableError
from registry.mlflow import access as access
from tests.models.bundles import PASSED, MakeBundle
from tests.models.registries import file_of


@contextmanager
def locked(registry: Registry, how: str) -> Iterator[None]:
    with closing(sqlite3.connect(file_of(registry), isolation_level=None)) as other:
        other.execute(f"BEGIN {how}")
        yield
        other.execute("ROLLBACK")


def unavailable(action: Callable[[], object]) -> str:
    with pytest.raises(RegistryUnavailableError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_locked_registry_is_read_or_refused_and_stays_as_it_was(
    registry: Registry, make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "LOCK_WAIT_S", 0.2)
    bundle = Bundle.open(make_bundle())
    version = registry.register(bundle)
    registry.promote(version, "production", PASSED)
    other = Bundle.open(make_bundle(seed=1))

    with locked(registry, "IMMEDIATE"):  # another process writes; reading is allowed
        assert registry.find("jets@production").number == 1
        writers: list[Callable[[], object]] = [
            lambda: registry.register(other),
            lambda: registry.promote(version, "staging", PASSED),
            lambda: registry.set_alias(version, "staging"),
        ]
        for action in writers:
            assert "database is locked: another process is using it" in unavailable(action)
    with locked(registry, "EXCLUSIVE"):
        everything: list[Callable[[], object]] = [
            lambda: registry.find("jets"),
            lambda: registry.list(),
            lambda: registry.versions("jets"),
            lambda: registry.rollback("jets"),
            lambda: registry.register(other),
        ]
        for action in everything:
            assert "database is locked" in unavailable(action)

    assert registry.find("jets").aliases == ("production",)
    assert registry.register(other).number == 2


def test_locked_in_the_middle_says_nothing_on_the_screen(
    registry: Registry, bundle: Bundle, capfd: pytest.CaptureFixture[str]
) -> None:
    """MLflow would log a traceback of the database error, which adds nothing to the clear line."""
    registry.register(bundle)
    with closing(sqlite3.connect(file_of(registry))) as connection:
        connection.execute("DROP TABLE registered_model_aliases")
    with pytest.raises(RegistryError, match="no such table: registered_model_aliases") as caught:
        registry.find("jets")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.db").write_bytes(b"some text that is no database at all" * 100)
    with pytest.raises(RegistryError, match="file is not a database"):
        Registry(f"sqlite:///{tmp_path}/r.db").list()


def test_folder_that_cannot_be_made(tmp_path: Path, bundle: Bundle) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryError, match=r"(File exists|Not a directory): .*/file"):
        Registry(f"sqlite:///{tmp_path}/file/r.db").register(bundle)


@pytest.mark.parametrize(
    "uri", ["folder", "/abs/folder", "file:///abs/folder", "C:\\folder", "./registry.db"]
)
def test_folders_are_not_registries(uri: str) -> None:
    with pytest.raises(RegistryError, match=r"write sqlite:///.*registry\.db, http://host:port"):
        Registry(uri)


@pytest.mark.parametrize("uri", ["sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_memory_is_not_a_registry(uri: str) -> None:
    with pytest.raises(RegistryError, match="a file is needed"):
        Registry(uri)


def test_unknown_scheme(bundle: Bundle) -> None:
    with pytest.raises(RegistryError, match="registry nonsense://x: ") as caught:
        Registry("nonsense://x", "/tmp").register(bundle)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "http://127.0.0.1:9/prefix/"])
def test_nobody_there(uri: str, bundle: Bundle) -> None:
    registry = Registry(uri)
    assert "no answer from the server" in unavailable(registry.list)
    assert "no answer from the server" in unavailable(lambda: registry.find("jets@production"))
    assert "no answer from the server" in unavailable(lambda: registry.register(bundle))


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg2", "mysql+pymysql"])
def test_no_database_server(scheme: str) -> None:
    registry = Registry(f"{scheme}://somebody:secret@127.0.0.1:9/mlflow")
    message = unavailable(registry.list)
    assert "no answer from the database" in message
    assert "secret" not in message + repr(registry)


def test_database_without_a_place_for_files(tmp_path: Path) -> None:
    remote = access.Access("postgresql://host/mlflow", None)
    with pytest.raises(RegistryError, match="PIPELINE_ARTIFACTS=<folder or URI>"):
        remote.artifact_location("jets")
    assert access.Access("http://host", None).artifact_location("jets") is None
    given = access.Access("postgresql://host/mlflow", "s3://bucket/path/")
    assert given.artifact_location("jets") == "s3://bucket/path/jets"
    local = access.Access("http://host", tmp_path / "a b")
    assert local.artifact_location("jets") == f"file://{tmp_path}/a%20b/jets"


def test_driver_that_is_not_installed() -> None:
    """The server answers, so MLflow tries to load the driver."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        registry = Registry(f"mssql+pymssql://127.0.0.1:{server.getsockname()[1]}/mlflow")
        with pytest.raises(RegistryError, match="No module named 'pymssql': install"):
            registry.list()


def test_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "ANSWER_WAIT_S", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        assert "no answer" in unavailable(Registry(f"http://127.0.0.1:{port}").list)


@pytest.mark.parametrize("replaced", [False, True])
def test_registry_that_was_deleted_meanwhile(
    registry: Registry, bundle: Bundle, empty_database: Path, replaced: bool
) -> None:
    """MLflow's open connection would keep writing to the deleted file."""
    registry.register(bundle)
    path = file_of(registry)
    path.rename(path.with_suffix(".away"))
    if replaced:
        shutil.copy(empty_database, path)
    else:
        with pytest.raises(NoRegistryError):
            registry.list()
    for each in (registry, Registry(registry.uri)):
        with pytest.raises(RegistryError, match="deleted or replaced since this process opened it"):
            each.register(bundle)
