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
def locked(registry: Registry, mode: str) -> Iterator[None]:
    """Another connection has a lock of SQLite, IMMEDIATE or EXCLUSIVE; the latter bars readers."""
    with closing(sqlite3.connect(file_of(registry), isolation_level=None)) as other:
        other.execute(f"BEGIN {mode}")
        yield
        other.execute("ROLLBACK")


def unavailable(action: Callable[[], object]) -> str:
    """The message, of one line, with which the action is refused."""
    with pytest.raises(RegistryUnavailableError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


Action = Callable[[Registry, Bundle], object]
"""What is done with a registry; the bundle is not in it yet."""
READ: dict[str, Action] = {
    "find": lambda registry, _: registry.find("jets"),
    "list": lambda registry, _: registry.list(),
    "versions": lambda registry, _: registry.versions("jets"),
}
WRITE: dict[str, Action] = {
    "register": lambda registry, bundle: registry.register(bundle),
    "promote": lambda registry, _: registry.promote(registry.find("jets"), "staging", PASSED),
    "alias": lambda registry, _: registry.set_alias(registry.find("jets"), "staging"),
}


@pytest.fixture
def in_use(registry: Registry, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry with jets/1 in production. A lock of others is waited for shortly."""
    monkeypatch.setattr(access, "LOCK_WAIT_S", 0.2)
    registry.promote(registry.register(bundle), "production", PASSED)
    return registry


@pytest.mark.parametrize("action", READ.values(), ids=READ)
def test_a_registry_into_which_others_write_can_be_read(
    in_use: Registry, bundle: Bundle, action: Action
) -> None:
    with locked(in_use, "IMMEDIATE"):
        assert action(in_use, bundle)
        assert in_use.find("jets@production").number == 1


@pytest.mark.parametrize("action", WRITE.values(), ids=WRITE)
def test_a_registry_into_which_others_write_is_not_changed(
    in_use: Registry, make_bundle: MakeBundle, action: Action
) -> None:
    other = Bundle.open(make_bundle(seed=1))
    with locked(in_use, "IMMEDIATE"):
        message = unavailable(lambda: action(in_use, other))
    assert "database is locked: another process is using it" in message
    assert in_use.find("jets").aliases == ("production",)
    assert in_use.register(other).number == 2


@pytest.mark.parametrize("action", [*READ.values(), *WRITE.values()], ids=[*READ, *WRITE])
def test_a_registry_that_others_have_to_themselves_is_unavailable(
    in_use: Registry, make_bundle: MakeBundle, action: Action
) -> None:
    other = Bundle.open(make_bundle(seed=1))
    with locked(in_use, "EXCLUSIVE"):
        assert "database is locked" in unavailable(lambda: action(in_use, other))
    assert in_use.find("jets").aliases == ("production",)
    assert in_use.register(other).number == 2


def test_a_rollback_in_a_registry_that_others_have_to_themselves_is_unavailable(
    in_use: Registry,
) -> None:
    with locked(in_use, "EXCLUSIVE"):
        assert "database is locked" in unavailable(lambda: in_use.rollback("jets"))
    assert in_use.find("jets").aliases == ("production",)


def test_an_error_of_the_database_says_nothing_on_the_screen(
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


def test_a_registry_in_place_of_whose_folder_is_a_file_is_refused(
    tmp_path: Path, bundle: Bundle
) -> None:
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


def test_a_uri_of_an_unknown_scheme_is_refused_in_one_line(bundle: Bundle) -> None:
    with pytest.raises(RegistryError, match="registry nonsense://x: ") as caught:
        Registry("nonsense://x", "/tmp").register(bundle)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "http://127.0.0.1:9/prefix/"])
@pytest.mark.parametrize("action", [READ["list"], READ["find"], WRITE["register"]])
def test_a_server_that_does_not_run_is_unavailable(
    uri: str, bundle: Bundle, action: Action
) -> None:
    assert "no answer from the server" in unavailable(lambda: action(Registry(uri), bundle))


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg2", "mysql+pymysql"])
def test_a_database_that_does_not_run_is_unavailable(scheme: str) -> None:
    registry = Registry(f"{scheme}://somebody:secret@127.0.0.1:9/mlflow")
    message = unavailable(registry.list)
    assert "no answer from the database" in message
    assert "secret" not in message + repr(registry)


def test_a_database_needs_a_place_for_files() -> None:
    remote = access.Access("postgresql://host/mlflow", None)
    with pytest.raises(RegistryError, match="PIPELINE_ARTIFACTS=<folder or URI>"):
        remote.artifact_location("jets")


@pytest.mark.parametrize(
    ("uri", "artifacts", "location"),
    [
        ("http://host", None, None),
        ("http://host", Path("/data/a b"), "file:///data/a%20b/jets"),
        ("postgresql://host/mlflow", "s3://bucket/path/", "s3://bucket/path/jets"),
    ],
    ids=["the server knows it", "a folder", "a bucket"],
)
def test_files_of_a_model_go_to_the_place_for_artifacts(
    uri: str, artifacts: str | Path | None, location: str | None
) -> None:
    assert access.Access(uri, artifacts).artifact_location("jets") == location


def test_a_driver_that_is_not_installed_is_named() -> None:
    """The server answers, so MLflow tries to load the driver."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        registry = Registry(f"mssql+pymssql://127.0.0.1:{server.getsockname()[1]}/mlflow")
        with pytest.raises(RegistryError, match="No module named 'pymssql': install"):
            registry.list()


def test_a_server_that_never_answers_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "ANSWER_WAIT_S", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        assert "no answer" in unavailable(Registry(f"http://127.0.0.1:{port}").list)


@pytest.fixture
def deleted(registry: Registry, bundle: Bundle) -> Registry:
    """A registry whose file was moved away since this process opened it."""
    registry.register(bundle)
    path = file_of(registry)
    path.rename(path.with_suffix(".away"))
    return registry


def test_a_registry_that_was_deleted_meanwhile_is_not_read(deleted: Registry) -> None:
    with pytest.raises(NoRegistryError):
        deleted.list()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_registry_that_was_deleted_meanwhile_is_not_written(
    deleted: Registry, bundle: Bundle, empty_database: Path, replaced: bool
) -> None:
    """MLflow's open connection would keep writing to the deleted file."""
    if replaced:
        shutil.copy(empty_database, file_of(deleted))
    for registry in (deleted, Registry(deleted.uri)):
        with pytest.raises(RegistryError, match="deleted or replaced since this process opened it"):
            registry.register(bundle)
