"""A registry is read with MLflow's client, by REST and from its tables, with the same result."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from registry import (
    Bundle,
    Decision,
    NoRegistryError,
    Policy,
    PromotionRefused,
    Registry,
    RegistryError,
    RegistryUnavailableError,
)
from registry.mlflow import ClientStore, RunQuery, Store, database_store
from registry.mlflow.access import Access
from registry.mlflow.store_protocol import Order
from tests.models import bundles
from tests.models.mlflow_server import client_of, served_here
from tests.models.registries import file_of
from tests.registry.campaigns.postgres import PostgreSQL, binaries

HOSTILE = [
    "it's", "a%b_c", "Ünïcode 模型 🚀", "sp ace", 'quo"te', "back\\slash", "JETS", "jets ",
    "jets'; DROP TABLE runs; --", "soa-pipeline lock jets", "-x", "a?b&c=d#e", "NULL",
]  # fmt: skip
VALUES = ["", "it's", 'a "quoted" line\nand another', "100 %", "模型 🚀", "\\", "x" * 4000, "NULL"]
NAMES = ["jets", "other", "never", "prompt", *HOSTILE]


def fill(registry: Registry, folder: Path) -> None:
    """Writes versions and events of this project, and objects that MLflow's users may add."""
    versions = [
        registry.register(bundles.made_bundle(folder / str(seed), seed), "jets")
        for seed in range(3)
    ]
    registry.register(Bundle.open(folder / "0"), "other")
    passed = [Decision("digests", True, "all match", "all match", VALUES[2])]
    failed = [Decision("speed", False, "2", "1", VALUES[4])]
    for version in versions[:2]:
        registry.promote(version, "production", passed, reason="100 % it's")
    with pytest.raises(PromotionRefused):
        registry.promote(versions[2], "production", failed)
    registry.approve(versions[2], "Ünïcode")
    registry.rollback("jets", VALUES[2])
    registry.set_policy(Policy(), None)
    registry.set_policy(Policy(), "jets")
    client = client_of(registry)
    for name in HOSTILE:
        client.create_registered_model(name, description=name, tags={"a key": name})
        client.create_experiment(name)
        for text in VALUES[:3]:
            client.create_model_version(
                name, f"/nowhere/{text[:9]}", tags={"digest": "d", "some/key": text}
            )
        client.set_registered_model_alias(name, "staging", "2")
        client.set_registered_model_alias(name, "it-s", "3")
        client.delete_model_version(name, "1")
    ours, deleted = (client.get_experiment_by_name(name) for name in ("jets", "a%b_c"))
    assert ours is not None and deleted is not None
    runs = [
        client.create_run(ours.experiment_id, tags={"a tag": text, "b": text}) for text in VALUES
    ]
    client.set_terminated(runs[1].info.run_id, "FAILED")
    client.set_terminated(runs[3].info.run_id)
    client.delete_run(runs[2].info.run_id)
    client.delete_experiment(deleted.experiment_id)
    client.register_prompt("prompt", "say {{x}}")  # not among the models


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Registry:
    folder = tmp_path_factory.mktemp("filled")
    shutil.copy(empty_database, folder / "registry.db")
    registry = Registry(f"sqlite:///{folder}/registry.db")
    fill(registry, folder / "bundles")
    return registry


@contextlib.contextmanager
def by_client(access: Access) -> Iterator[Store]:
    with access.client() as client:
        yield ClientStore(client)


ORDERS: tuple[Order, ...] = ("start_time ASC", "start_time DESC", "end_time DESC")
TAGS = [("soa.event", None), ("soa.event", "promotion"), ("a tag", None), ("b", "100 %")]
STARTED = [None, (0, 1), (0, 1 << 50)]
# Each tag with each time of start. The other fields alternate, so that of two fields each pair of
# values occurs in some query.
QUERIES = [
    RunQuery(
        "", *TAGS[i], (None, "FINISHED")[(i + j) % 2], STARTED[j], ORDERS[(i + j) % 3],
        (None, 1)[(i // 2 + j) % 2],
    )
    for i, j in product(range(len(TAGS)), range(len(STARTED)))
]  # fmt: skip


def answers_of_store(store: Store) -> dict[str, Any]:
    """The results of every operation of a store on every name, by operation and arguments."""
    answers: dict[str, Any] = {"models": sorted(store.models(), key=lambda model: model.name)}
    for name in NAMES:
        answers[f"model {name}"] = store.model(name)
        answers[f"experiment {name}"] = experiment = store.experiment(name)
        for number in (1, 2, 9):
            answers[f"version {name} {number}"] = store.version(name, number)
        if "'" not in name:
            answers[f"versions {name}"] = sorted(store.versions(name), key=lambda v: v.number)
        if experiment is None:
            continue
        for unplaced in QUERIES if name == "jets" else QUERIES[:1]:
            query = replace(unplaced, experiment=experiment.id)
            answers[f"runs {query}"] = store.runs(query)
    return answers


def require_answers_of_the_client(registry: Registry) -> None:
    """Compares the registry's own reading with that of MLflow's client."""
    with registry.reading() as store:
        assert not isinstance(store, ClientStore)
        ours = answers_of_store(store)
    with by_client(registry) as store:
        theirs = answers_of_store(store)
    for operation, answer in theirs.items():
        assert ours[operation] == answer, operation
    # The answers are not all empty, or equal answers would mean nothing.
    assert len(theirs["models"]) >= 2 + len(HOSTILE)
    assert sum(map(bool, theirs.values())) > 60
    experiment = theirs["experiment jets"].id
    runs = [theirs[f"runs {replace(query, experiment=experiment)}"] for query in QUERIES]
    assert [item != [] for item in runs] == [query.started != (0, 1) for query in QUERIES]
    assert theirs["experiment a%b_c"].active is False


def answers_of_registry(registry: Registry) -> dict[str, Any]:
    """The answers of a registry's methods for reading, and its errors."""
    answers: dict[str, Any] = {"list": registry.list(), "history": registry.history("jets")}
    answers["versions"] = registry.versions("jets")
    for ref in ("jets", "jets/1", "jets@production", "other@previous", "jets/7", "never", "JETS/2"):
        try:
            answers[ref] = registry.find(ref)
        except RegistryError as error:
            answers[ref] = type(error), str(error)
    answers["promotions"] = registry.promotions(answers["jets/1"], "production")
    answers["policies"] = [registry.policies(model) for model in (None, "jets", "never")]
    return answers


def test_sqlite_gives_the_answers_of_mlflows_client(
    filled: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are read by us, or by MLflow's client where its release is untested."""
    ours = answers_of_registry(filled)
    require_answers_of_the_client(filled)
    monkeypatch.setattr(database_store, "TESTED", frozenset())  # like an untested release of MLflow
    with filled.reading() as store:
        assert isinstance(store, ClientStore)
    assert answers_of_registry(filled) == ours
    assert len(ours["history"]) == 5
    assert ours["jets@production"].number == 1
    assert len(ours["policies"][1]) == 2


@pytest.mark.skipif(importlib.util.find_spec("flask") is None, reason="needs the mlflow extra")
def test_a_server_is_read_as_by_the_client(filled: Registry, tmp_path: Path) -> None:
    with served_here(tmp_path, file_of(filled)) as uri:
        require_answers_of_the_client(Registry(uri))
        assert len(Registry(uri).history("jets")) == 5


@pytest.mark.long
@pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed")
def test_postgresql_is_read_as_by_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = binaries()
    assert folder is not None
    database = PostgreSQL(folder)
    try:
        database.start()
        registry = Registry(database.uri, tmp_path / "artifacts")
        fill(registry, tmp_path / "bundles")
        require_answers_of_the_client(registry)
        ours = answers_of_registry(registry)
        monkeypatch.setattr(database_store, "TESTED", frozenset())
        assert answers_of_registry(registry) == ours
    finally:
        database.remove()


def test_reading_writes_nothing(filled: Registry, tmp_path: Path) -> None:
    copy = tmp_path / "registry.db"
    shutil.copy(file_of(filled), copy)
    before = copy.read_bytes()
    answers_of_registry(Registry(f"sqlite:///{copy}"))
    assert copy.read_bytes() == before
    assert [path.name for path in tmp_path.glob("registry.db*")] == ["registry.db"]


def test_tables_of_several_workspaces_are_left_to_mlflow(filled: Registry, tmp_path: Path) -> None:
    copy = tmp_path / "registry.db"
    shutil.copy(file_of(filled), copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection, connection:
        connection.execute("UPDATE experiments SET workspace = 'theirs' WHERE name = 'JETS'")
    with pytest.raises(RegistryError, match="workspace"):  # MLflow's own error
        Registry(f"sqlite:///{copy}").list()


@pytest.fixture
def tableless(tmp_path: Path) -> Registry:
    """A registry whose database is an empty file."""
    (tmp_path / "registry.db").touch()
    return Registry(f"sqlite:///{tmp_path}/registry.db")


def test_reading_a_database_without_tables_makes_none(tableless: Registry) -> None:
    with pytest.raises(NoRegistryError, match="no tables"):
        tableless.list()
    assert file_of(tableless).read_bytes() == b""


def test_the_first_version_makes_the_tables(tableless: Registry, bundle: Bundle) -> None:
    registry = tableless
    registry.register(bundle)
    assert [model.name for model in registry.list()] == ["jets"]


Answer = Callable[[str, dict[str, str]], tuple[int, object]]


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[Registry]:
    """A registry on a server that gives the status and the JSON data of `answer(path, headers)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, data = answer(self.path, dict(self.headers))
            content = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Registry(f"http://127.0.0.1:{server.server_port}/prefix/")
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder; no variable of MLflow's holds a password or a token."""
    for name in ("USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


BASIC = "Basic " + base64.b64encode(b"ada:a:b%").decode()


def sent_credentials() -> set[str | None]:
    """The credentials that a server gets, both in the first check and in a request."""
    sent: dict[str, str | None] = {}

    def answer(path: str, headers: dict[str, str]) -> tuple[int, object]:
        sent[path.partition("?")[0]] = headers.get("Authorization")
        return 200, {}

    with answering(answer) as registry:
        assert registry.list() == []
    assert sent.keys() == {"/prefix/health", "/prefix/api/2.0/mlflow/registered-models/search"}
    return set(sent.values())


@dataclass(frozen=True)
class Busy:
    """A registry whose server answers the next requests with these errors, from the last one on."""

    registry: Registry
    errors: list[int]


@pytest.mark.parametrize(
    ("variables", "sent"),
    [
        ({}, None),
        ({"TOKEN": "t"}, "Bearer t"),
        ({"USERNAME": "ada", "PASSWORD": "a:b%", "TOKEN": "t"}, BASIC),
    ],
)
def test_a_server_gets_the_credentials_of_mlflows_variables(
    variables: dict[str, str],
    sent: str | None,
    no_credentials: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", value)
    assert sent_credentials() == {sent}


def test_a_server_gets_the_credentials_of_mlflows_file(no_credentials: Path) -> None:
    (no_credentials / ".mlflow").mkdir()
    (no_credentials / ".mlflow" / "credentials").write_text(
        "[mlflow]\nmlflow_tracking_username = ada\nmlflow_tracking_password = a:b%\n"
    )
    assert sent_credentials() == {BASIC}


@pytest.fixture
def busy(no_credentials: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Busy]:
    """A server of which a request may be repeated twice."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    errors: list[int] = []

    def answer(path: str, headers: dict[str, str]) -> tuple[int, object]:
        if errors and not path.endswith("health"):
            return errors.pop(), {}
        return 200, {}

    with answering(answer) as registry:
        yield Busy(registry, errors)


def test_a_busy_server_is_asked_again(busy: Busy) -> None:
    busy.errors.extend([503, 429])
    assert busy.registry.list() == []


def test_a_server_that_stays_busy_is_unavailable(busy: Busy) -> None:
    busy.errors.extend([503] * 3)
    with pytest.raises(RegistryUnavailableError):
        busy.registry.list()


def test_a_proxy_that_has_lost_its_server_is_unavailable() -> None:
    with (
        answering(lambda path, headers: (503, {})) as registry,
        pytest.raises(RegistryUnavailableError, match=r"not available \(HTTP 503\)"),
    ):
        registry.list()


@pytest.mark.parametrize("data", [{"error_code": "PERMISSION_DENIED", "message": "no"}, "no", None])
def test_a_server_that_refuses_is_an_error_of_one_line(data: object, no_credentials: Path) -> None:
    def refuse(path: str, headers: dict[str, str]) -> tuple[int, object]:
        return (200, {}) if path.endswith("health") else (403, data)

    with answering(refuse) as registry, pytest.raises(RegistryError) as caught:
        registry.list()
    assert not isinstance(caught.value, RegistryUnavailableError)
    assert "\n" not in str(caught.value)
