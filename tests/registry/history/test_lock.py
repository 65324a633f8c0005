"""The turn to write: by a file beside SQLite, and by a lease in every other registry.

The lease is tried on SQLite, through the same calls of MLflow that a server answers; `test_server`
has it behind one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy import event
from sqlalchemy.engine import Engine

from registry import Registry, RegistryUnavailableError
from registry.history import lock

LOCK = "soa-pipeline lock jets"


@pytest.fixture
def client(registry: Registry) -> MlflowClient:
    return MlflowClient(tracking_uri=registry.uri, registry_uri=registry.uri)


def names(client: MlflowClient) -> list[str]:
    return [model.name for model in client.search_registered_models()]


def test_file_lock_waits_and_says_who_to_stop(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "QUEUE_WAIT_S", 0.1)
    access = registry._access
    with (
        lock.exclusive(access, client, "jets"),
        pytest.raises(RegistryUnavailableError, match=r"holds .*registry\.db\.lock: stop it"),
        lock.exclusive(access, client, "tracks"),
    ):
        pass
    with lock.exclusive(access, client, "jets") as turn:
        turn.require()


HOLDER = """
import sys, time
from registry import Registry, lock
with lock.exclusive(Registry(sys.argv[1])._access, None, "jets"):
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
    with lock.exclusive(registry._access, client, "jets") as turn:
        turn.require()


def test_lease_is_there_while_it_is_held(registry: Registry, client: MlflowClient) -> None:
    with lock._lease(registry._access, client, LOCK) as turn:
        turn.require()
        assert names(client) == [LOCK]
    assert names(client) == []


def test_lease_keeps_writers_apart(registry: Registry, client: MlflowClient) -> None:
    inside: list[int] = []
    most: list[int] = []

    def write(number: int) -> None:
        for _ in range(3):
            with lock._lease(registry._access, client, LOCK):
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.01)
                inside.remove(number)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 12
    assert names(client) == []


def test_a_lease_that_ends_while_it_is_read(registry: Registry, client: MlflowClient) -> None:
    """MLflow reads a model and then its tags: of a lease that was released in between, it gives a
    model without an owner. Who sees that must not end the lease of the next owner."""
    owners = ["first"]
    held = lock._created(client, LOCK, owners[0])
    busy = False

    def interleave(connection: Any, _: object, statement: str, *_more: object) -> None:
        """A lease ends before each look at its tags, and the next one begins right after."""
        nonlocal held, busy
        if busy or connection.connection.dbapi_connection.in_transaction:  # others cannot write now
            return
        if ("registered_model_tags" in statement) != held:
            return
        busy = True
        if held:
            lock._release(client, LOCK, owners[-1])
        else:
            owners.append(f"number {len(owners)}")
            lock._created(client, LOCK, owners[-1])
        held, busy = not held, False

    waiting = lock._Queue(client, LOCK)
    event.listen(Engine, "before_cursor_execute", interleave)
    try:
        assert waiting.ask() is None
    finally:
        event.remove(Engine, "before_cursor_execute", interleave)
    assert len(owners) > 1
    assert names(client) == [LOCK] * held


def test_lease_of_a_dead_owner_is_taken_over_once(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LEASE_S", 0.5)
    lock._created(client, LOCK, "dead")
    begun = time.monotonic()
    with lock._lease(registry._access, client, LOCK):
        assert time.monotonic() - begun > 0.5
        assert names(client) == [LOCK, f"{LOCK} dead"]
        owner = client.get_registered_model(LOCK).tags["owner"]
        lock._bury(client, LOCK, "dead")  # a slower successor of the same dead owner
        assert client.get_registered_model(LOCK).tags["owner"] == owner


def test_an_owner_is_dead_when_it_was_seen_for_as_long_as_a_lease_lasts(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock._created(client, LOCK, "one")
    waiting = lock._Queue(client, LOCK)
    for _ in range(3):
        assert waiting.ask() is None
    assert names(client) == [LOCK]
    monkeypatch.setattr(time, "monotonic", lambda plain=time.monotonic: plain() + lock.LEASE_S)
    assert waiting.ask() is None
    assert names(client) == [f"{LOCK} one"]
    assert waiting.ask() is not None


def test_names_of_the_long_dead_are_removed(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock._created(client, LOCK, "one")
    lock._bury(client, LOCK, "one")
    lock._created(client, LOCK, "two")
    lock._bury(client, LOCK, "two")
    assert names(client) == [f"{LOCK} one", f"{LOCK} two"]
    monkeypatch.setattr(lock, "_KEEP_DEAD", -lock._KEEP_DEAD)
    lock._created(client, LOCK, "three")
    lock._bury(client, LOCK, "three")
    assert names(client) == []


def test_late_owner_writes_no_more_and_ends_no_other_lease(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lock._lease(registry._access, client, LOCK) as turn:
        monkeypatch.setattr(time, "monotonic", lambda plain=time.monotonic: plain() + lock.LEASE_S)
        with pytest.raises(RegistryUnavailableError, match="nothing more was changed"):
            turn.require()
        lock._bury(client, LOCK, client.get_registered_model(LOCK).tags["owner"])
        lock._created(client, LOCK, "the next")
    assert client.get_registered_model(LOCK).tags["owner"] == "the next"


def test_lease_that_is_never_free(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "QUEUE_WAIT_S", 0.3)
    lock._created(client, LOCK, "busy")
    with (
        pytest.raises(RegistryUnavailableError, match=r"others have been writing for 0\.3 s"),
        lock._lease(registry._access, client, LOCK),
    ):
        pass


def test_a_creation_that_was_sent_twice(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer was lost, the second says that the name is taken: by ourselves."""
    plain = MlflowClient.create_registered_model

    def twice(*arguments: object, **more: object) -> object:
        plain(*arguments, **more)  # type: ignore[arg-type]
        return plain(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(MlflowClient, "create_registered_model", twice)
    with lock._lease(registry._access, client, LOCK) as turn:
        turn.require()
    assert names(client) == []


def test_a_server_that_goes_away_while_one_waits(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time it had done what was asked, and the answer was lost."""
    plain = MlflowClient.create_registered_model
    asked: list[str] = []

    def away(*arguments: object, **more: object) -> object:
        asked.append(os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"])
        if len(asked) > 2:
            return plain(*arguments, **more)  # type: ignore[arg-type]
        if len(asked) == 2:
            plain(*arguments, **more)  # type: ignore[arg-type]
        raise MlflowException("API request to http://host/ failed with exception [Errno 111] no")

    monkeypatch.setattr(MlflowClient, "create_registered_model", away)
    with lock._lease(registry._access, client, LOCK) as turn:
        turn.require()
        assert names(client) == [LOCK]
    assert asked == ["0", "0", "0"]
    assert names(client) == []
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ

    monkeypatch.setattr(lock, "OUTAGE_WAIT_S", 0.0)
    asked.clear()
    with (
        pytest.raises(MlflowException, match="API request to"),
        lock._lease(registry._access, client, LOCK),
    ):
        pass


def test_a_lost_answer_of_long_ago_is_not_a_turn(
    registry: Registry, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have seen that lease for as long, and be about to end it."""
    queue = lock._Queue(client, LOCK)
    first = queue.token
    lock._created(client, LOCK, first)
    queue._asked = time.monotonic() - lock.LEASE_S
    assert queue.ask() is None
    assert names(client) == []
    assert queue.token != first
    turn = queue.ask()
    assert turn is not None
    turn.require()
    assert client.get_registered_model(LOCK).tags["owner"] == queue.token
