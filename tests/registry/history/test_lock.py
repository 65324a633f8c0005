"""The write lock: a file beside SQLite, and a lease in every other registry.

Here the lease is tested on SQLite, through the same calls of MLflow that a server answers;
`test_server` tests it with a server.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy import event
from sqlalchemy.engine import Engine

from registry import Registry, RegistryUnavailableError
from registry.history import lock
from registry.history.lock import Lease, WriteLock, write_lock
from tests.models.mlflow_server import client_of

LOCK = "soa-pipeline lock jets"


@pytest.fixture
def client(registry: Registry) -> MlflowClient:
    return client_of(registry)


@contextmanager
def leased(registry: Registry, client: MlflowClient) -> Iterator[WriteLock]:
    registry.sqlite = None
    with write_lock(registry, client, "jets") as held:
        yield held


def acquired(client: MlflowClient, token: str) -> Lease:
    """The lease of an owner that does nothing afterwards."""
    lease = Lease(client, LOCK)
    lease.token = token
    assert lease.try_acquire() is not None
    return lease


def outlast_a_lease(patch: pytest.MonkeyPatch) -> None:
    """Moves this process's clock forward by the duration of a lease."""
    monotonic = time.monotonic
    patch.setattr(time, "monotonic", lambda: monotonic() + lock.LEASE_S)


def model_names(client: MlflowClient) -> list[str]:
    return [model.name for model in client.search_registered_models()]


def owner(client: MlflowClient) -> str:
    return str(client.get_registered_model(LOCK).tags["owner"])


def test_file_lock_waits_and_says_who_to_stop(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "QUEUE_WAIT_S", 0.1)
    with (
        write_lock(registry, client, "jets"),
        pytest.raises(RegistryUnavailableError, match=r"registry\.db\.lock"),
        write_lock(registry, client, "tracks"),
    ):
        pytest.fail("two writers have the lock")


def test_file_lock_is_free_after_its_holder(registry: Registry, client: MlflowClient) -> None:
    with write_lock(registry, client, "jets"):
        pass
    with write_lock(registry, client, "tracks") as held:
        held.check()


HOLDER = """
import sys, time
from registry import Registry
from registry.history import write_lock
with write_lock(Registry(sys.argv[1]), None, "jets"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_file_lock_of_a_killed_process_is_free(registry: Registry, client: MlflowClient) -> None:
    command = [sys.executable, "-c", HOLDER, registry.uri]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    with write_lock(registry, client, "jets") as held:
        held.check()


def test_lease_keeps_writers_apart(registry: Registry, client: MlflowClient) -> None:
    inside: list[list[str]] = []
    busy = threading.Lock()

    def write() -> None:
        for _ in range(3):
            with leased(registry, client) as held:
                assert busy.acquire(blocking=False)
                held.check()
                time.sleep(0.01)  # so that another one would come in
                inside.append(model_names(client)[:1])
                busy.release()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == [[LOCK]] * 12
    assert model_names(client) == []


def test_a_lease_that_ends_while_it_is_read_ends_no_other_one(client: MlflowClient) -> None:
    """A waiting process must not end the lease of the next owner.

    MLflow reads a model and then its tags: if the lease is released in between, it returns a model
    without an owner.
    """
    owners = [acquired(client, "first")]
    held, busy = True, False  # whether there is a lease; whether `interleave` itself is reading

    def interleave(connection: Any, _: object, statement: str, *_more: object) -> None:
        """Ends the lease before each read of its tags, and begins the next one right afterwards."""
        nonlocal held, busy
        if busy or connection.connection.dbapi_connection.in_transaction:  # others cannot write now
            return
        if ("registered_model_tags" in statement) != held:
            return
        busy = True
        if held:
            owners[-1].release()
        else:
            owners.append(acquired(client, f"number {len(owners)}"))
        held, busy = not held, False

    waiting = Lease(client, LOCK)
    event.listen(Engine, "before_cursor_execute", interleave)
    try:
        assert waiting.try_acquire() is None
    finally:
        event.remove(Engine, "before_cursor_execute", interleave)
    assert len(owners) > 1
    assert model_names(client) == ([LOCK] if held else [])


def test_lease_of_a_dead_owner_is_taken_over_once(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LEASE_S", 0.5)
    acquired(client, "dead")
    start = time.monotonic()
    with leased(registry, client):
        assert time.monotonic() - start > 0.5
        assert model_names(client) == [LOCK, f"{LOCK} dead"]
        successor = owner(client)
        Lease(client, LOCK).bury("dead")  # a slower process that saw the same dead owner
        assert owner(client) == successor


def test_an_owner_is_dead_when_it_was_seen_for_as_long_as_a_lease_lasts(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquired(client, "one")
    waiting = Lease(client, LOCK)
    for _ in range(3):
        assert waiting.try_acquire() is None
    assert model_names(client) == [LOCK]
    outlast_a_lease(monkeypatch)
    assert waiting.try_acquire() is None
    assert model_names(client) == [f"{LOCK} one"]
    assert waiting.try_acquire() is not None


def test_names_of_the_long_dead_are_removed(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in ("one", "two"):
        acquired(client, token).bury(token)
    assert model_names(client) == [f"{LOCK} one", f"{LOCK} two"]
    monkeypatch.setattr(lock, "KEEP_DEAD", -timedelta(hours=1))  # all died longer ago than that
    acquired(client, "three").bury("three")
    assert model_names(client) == []


def test_late_owner_writes_no_more_and_ends_no_other_lease(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with leased(registry, client) as held:
        outlast_a_lease(monkeypatch)
        with pytest.raises(RegistryUnavailableError, match="nothing more was changed"):
            held.check()
        Lease(client, LOCK).bury(owner(client))
        acquired(client, "the next")
    assert owner(client) == "the next"


def test_a_writer_gives_up_on_a_lease_that_is_never_free(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "QUEUE_WAIT_S", 0.3)
    acquired(client, "busy")
    with pytest.raises(RegistryUnavailableError, match=r"0\.3 s"), leased(registry, client):
        pytest.fail("two writers have the lock")


def test_a_creation_that_was_sent_twice_gives_the_lock(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer was lost; the second one says that the name exists: we have made it."""
    create: Any = MlflowClient.create_registered_model

    def twice(*arguments: object, **options: object) -> object:
        create(*arguments, **options)
        return create(*arguments, **options)

    monkeypatch.setattr(MlflowClient, "create_registered_model", twice)
    with leased(registry, client) as held:
        held.check()
    assert model_names(client) == []


@pytest.fixture
def retries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often MLflow may repeat each request for a lease; the first two get no answer.

    The second request was carried out, but its answer was lost.
    """
    create: Any = MlflowClient.create_registered_model
    settings: list[str] = []

    def unanswered_twice(*arguments: object, **options: object) -> object:
        settings.append(os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"])
        if len(settings) > 2:
            return create(*arguments, **options)
        if len(settings) == 2:
            create(*arguments, **options)
        raise MlflowException("API request to http://host/ failed with exception [Errno 111] no")

    monkeypatch.setattr(MlflowClient, "create_registered_model", unanswered_twice)
    return settings


def test_a_writer_that_waits_asks_again_after_an_outage(
    registry: Registry, client: MlflowClient, retries: list[str]
) -> None:
    with leased(registry, client) as held:
        held.check()
        assert model_names(client) == [LOCK]
    assert retries == ["0", "0", "0"]
    assert model_names(client) == []
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


@pytest.mark.usefixtures("retries")
def test_a_writer_gives_up_after_a_long_outage(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "OUTAGE_WAIT_S", 0.0)
    with pytest.raises(MlflowException, match="API request to"), leased(registry, client):
        pytest.fail("there is no lock")


@pytest.fixture
def unanswered(client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> Lease:
    """A lease that MLflow made long ago; the answer was lost."""
    lease = Lease(client, LOCK)
    create: Any = MlflowClient.create_registered_model

    def lost(*arguments: object, **options: object) -> None:
        create(*arguments, **options)
        raise MlflowException("API request to http://host/ failed")

    with monkeypatch.context() as patch, pytest.raises(MlflowException):
        patch.setattr(MlflowClient, "create_registered_model", lost)
        lease.try_acquire()
    outlast_a_lease(monkeypatch)
    return lease


def test_a_lost_answer_of_long_ago_is_not_the_lock(client: MlflowClient, unanswered: Lease) -> None:
    """Others may have seen that lease for as long, and may be about to end it."""
    assert unanswered.try_acquire() is None
    assert model_names(client) == []


def test_after_a_lost_answer_a_writer_takes_a_lease_of_another_token(
    client: MlflowClient, unanswered: Lease
) -> None:
    first = unanswered.token
    unanswered.try_acquire()
    acquired_it = unanswered.try_acquire()
    assert acquired_it is not None
    acquired_it.check()
    assert owner(client) == unanswered.token != first
