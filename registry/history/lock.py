"""One writer at a time: what keeps promotions, rollbacks and new versions apart.

An SQLite registry has a file lock beside it (`registry.db.lock`, flock): exclusive between threads
and processes of a host, and the kernel lets it go when its holder dies, however it dies. Between
hosts it is as good as flock on that file system is; SQLite asks the same of it.

Every other registry (a tracking server, PostgreSQL, MySQL) has a lease, made of MLflow's one
operation that only one caller can win: the creation of a registered model with a given name. While
the model "soa-pipeline lock NAME" exists, its owner writes and the others wait. What is guaranteed:

- Two owners never overlap as long as no single request of an owner takes longer than half of
  LEASE_S. An owner stops, with an error, before any write later than LEASE_S / 2 after it asked.
- An owner that died is replaced by whoever has seen it unchanged for LEASE_S by its own clock; the
  clocks of hosts are never compared. The dead lease is renamed to a name made of its owner's
  token, which works for one of several successors and never for a lease that is not that one.
- MLflow has no conditional write. A request that a dead owner sent, and that the network delivers
  after LEASE_S, does arrive; the next writer finds the alias moved and says so in the history.
- MLflow's client repeats a request that a server did not answer, for minutes, and MLflow has no
  word for "only once": what was done and not answered would be there twice. So an owner's requests
  are sent once and given up after LEASE_S / 4, which counts for the connection and for the answer.
  Then the writer ends with an error, and whoever writes next settles what it left. Who waits for a
  lease is more patient: OUTAGE_WAIT_S.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from registry import stamp
from registry.errors import RegistryUnavailableError
from registry.mlflow import all_pages, has_code, model_of, sent_once, translated

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry.mlflow import Access

LEASE_S = 30.0
QUEUE_WAIT_S = 120.0
"""How long a writer waits for its turn: longer than LEASE_S, for an owner may have died."""
OUTAGE_WAIT_S = 60.0
"""How long a writer that has changed nothing yet waits for a server that went away."""

_OWNER = "owner"
_BY = "by"
_KEEP_DEAD = timedelta(hours=1)


@dataclass(frozen=True)
class Turn:
    """The right to write. `until`: on this process's monotonic clock; None while it holds it."""

    until: float | None

    def require(self) -> None:
        """To be asked before each write; raises when another writer may have taken over."""
        if self.until is not None and time.monotonic() > self.until:
            raise RegistryUnavailableError(
                f"the registry took longer than {LEASE_S / 2:g} s, and another writer may have "
                "begun: nothing more was changed, run the command again"
            )


@contextlib.contextmanager
def exclusive(access: Access, client: MlflowClient, name: str) -> Iterator[Turn]:
    """Wait for the turn to write what belongs to model `name`; not to be nested."""
    if access.sqlite is None:
        with _lease(access, client, f"soa-pipeline lock {name}") as turn:
            yield turn
        return
    from filelock import FileLock, Timeout

    lock = FileLock(f"{access.sqlite}.lock", timeout=QUEUE_WAIT_S)
    try:
        lock.acquire()
    except Timeout:
        raise RegistryUnavailableError(
            f"registry {access.shown}: another process has been writing for {QUEUE_WAIT_S:g} s "
            f"and holds {access.sqlite}.lock: stop it, or try again"
        ) from None
    try:
        yield Turn(None)
    finally:
        lock.release()


@contextlib.contextmanager
def _lease(access: Access, client: MlflowClient, lock: str) -> Iterator[Turn]:
    with sent_once(LEASE_S / 4):
        queue = _Queue(client, lock)
        turn = _acquire(access, queue)
        try:
            yield turn
        finally:
            # Late, it may already be somebody else's: left to them.
            if turn.until is not None and time.monotonic() < turn.until:
                _release(client, lock, queue.token)


def _release(client: MlflowClient, lock: str, token: str) -> None:
    """By a name of its own: a request that arrives late or twice cannot end the next owner's."""
    with contextlib.suppress(Exception):  # not released, it runs out
        client.rename_registered_model(lock, f"{lock} {token}")
        client.delete_registered_model(f"{lock} {token}")


def _acquire(access: Access, queue: _Queue) -> Turn:
    give_up = time.monotonic() + QUEUE_WAIT_S
    away = 0.0  # since when nobody has answered
    while True:
        try:
            turn = queue.ask()
        except Exception as error:
            away = away or time.monotonic()
            passing = isinstance(translated(error, access.shown), RegistryUnavailableError)
            if not passing or time.monotonic() - away > OUTAGE_WAIT_S:
                raise
            time.sleep(random.uniform(0.2, 1))
            continue
        if turn is not None:
            return turn
        away = 0.0
        if time.monotonic() > give_up:
            raise RegistryUnavailableError(
                f"registry {access.shown}: others have been writing for {QUEUE_WAIT_S:g} s, now "
                f"{queue.holder}: try again"
            )
        time.sleep(random.uniform(0.02, 0.2))


class _Queue:
    """A writer that waits for a lease."""

    def __init__(self, client: MlflowClient, lock: str) -> None:
        self._client, self._lock, self.token = client, lock, uuid.uuid4().hex
        self._asked: float | None = None  # when the lease was first asked for, without an answer
        self._seen, self._since = "", 0.0
        self.holder = "somebody"

    def ask(self) -> Turn | None:
        """The turn, if it is ours now."""
        begun = time.monotonic()
        self._asked = begun if self._asked is None else self._asked
        if _created(self._client, self._lock, self.token):
            return Turn(begun + LEASE_S / 2)
        found = model_of(self._client, self._lock)
        if found is None:
            return None
        owner, now = found.tags.get(_OWNER), time.monotonic()
        if owner is None:  # released while MLflow read it: the model first, then its tags
            return None
        self.holder = found.tags.get(_BY, "somebody")
        if owner == self.token:  # made by a request whose answer was lost, then or later
            if now < self._asked + LEASE_S / 2:
                return Turn(self._asked + LEASE_S / 2)
            _release(self._client, self._lock, self.token)
            self.token = uuid.uuid4().hex  # not released, it is a dead owner's
        self._asked = None
        if owner != self._seen:
            self._seen, self._since = owner, now
        elif now - self._since > LEASE_S:
            _bury(self._client, self._lock, owner)
        return None


def _created(client: MlflowClient, lock: str, token: str) -> bool:
    try:
        client.create_registered_model(
            lock,
            tags={_OWNER: token, _BY: stamp.user_at_host()},
            description="A writer of soa-pipeline is at work; this goes away by itself.",
        )
    except Exception as error:
        # Taken; or it was, and MLflow did not find it any more when it looked by whom.
        if has_code(error, "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST"):
            return False
        raise
    return True


def _bury(client: MlflowClient, lock: str, owner: str) -> None:
    """Take a dead owner's lease out of the way, unless another successor was quicker."""
    try:
        client.rename_registered_model(lock, f"{lock} {owner}")
    except Exception as error:
        # On PostgreSQL, of two at one moment: "expected to update 1 row(s); 0 were matched".
        quicker = has_code(error, "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST")
        if not quicker and "0 were matched" not in str(error):
            raise
        return
    # The name must stay taken while a slower successor may still try it.
    oldest = datetime.now(UTC) - _KEEP_DEAD
    for dead in all_pages(client.search_registered_models, f"name LIKE '{lock} %'"):
        if dead.last_updated_timestamp / 1000 < oldest.timestamp():
            with contextlib.suppress(Exception):
                client.delete_registered_model(dead.name)
