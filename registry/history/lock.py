"""One writer at a time: what keeps promotions, rollbacks and new versions apart.

An SQLite registry has a file lock beside it (`registry.db.lock`, flock): exclusive between threads
and processes of a host, and released by the kernel when its holder dies, however it dies. Between
hosts it is as good as flock on that file system is; SQLite asks the same of it.

Every other registry (a tracking server, PostgreSQL, MySQL) has a lease, made of MLflow's one
operation that only one caller can win: the creation of a registered model with a given name. While
the model "soa-pipeline lock NAME" exists, its owner writes and the others wait:

- Two owners never overlap as long as no single request of an owner takes longer than half of
  LEASE_S. An owner stops, with an error, before any write later than LEASE_S / 2 after it asked.
- A dead owner is replaced by whoever has seen its lease unchanged for LEASE_S by its own clock; the
  clocks of hosts are never compared. The dead lease is renamed to a name made of its owner's
  token, which works for one of several successors and never for a lease that is not that one.
- MLflow has no conditional write. A request that a dead owner sent, and that the network delivers
  after LEASE_S, does arrive; the next writer finds the alias moved and says so in the history.
- MLflow's client repeats a request that a server did not answer, so that what was done but not
  answered would be done twice. An owner's requests are therefore sent once and given up after
  LEASE_S / 4, for the connection and for the answer each. Then the writer ends with an error, and
  the next one settles what it left. Who waits for a lease is more patient: OUTAGE_WAIT_S.
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
from registry.mlflow import models, sent_once, translated

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry.mlflow import Access

LEASE_S = 30.0
QUEUE_WAIT_S = 120.0
"""How long a writer waits for the lock: longer than LEASE_S, for an owner may have died."""
OUTAGE_WAIT_S = 60.0
"""How long a writer that has changed nothing yet waits for a server that went away."""
KEEP_DEAD = timedelta(hours=1)
"""How long the name of a dead lease stays taken, for a slower successor may still try it."""

_OWNER = "owner"
_BY = "by"


@dataclass(frozen=True)
class WriteLock:
    """The right to write. `until`: when a lease ends, on this process's monotonic clock."""

    until: float | None

    def check(self) -> None:
        """To be called before each write; raises when another writer may have taken over."""
        if self.until is not None and time.monotonic() > self.until:
            raise RegistryUnavailableError(
                f"the registry took longer than {LEASE_S / 2:g} s, and another writer may have "
                "begun: nothing more was changed, run the command again"
            )


@contextlib.contextmanager
def write_lock(access: Access, client: MlflowClient, name: str) -> Iterator[WriteLock]:
    """Wait for the lock on all that belongs to model `name`; not to be nested."""
    if access.sqlite is None:
        with sent_once(LEASE_S / 4):
            lease = Lease(client, f"soa-pipeline lock {name}")
            held = _wait(access, lease)
            try:
                yield held
            finally:
                # Late, it may already be somebody else's: left to them.
                if held.until is not None and time.monotonic() < held.until:
                    lease.release()
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
        yield WriteLock(None)
    finally:
        lock.release()


def _wait(access: Access, lease: Lease) -> WriteLock:
    give_up = time.monotonic() + QUEUE_WAIT_S
    away = 0.0  # since when nobody has answered
    while True:
        try:
            held = lease.try_acquire()
        except Exception as error:
            away = away or time.monotonic()
            passing = isinstance(translated(error, access.shown), RegistryUnavailableError)
            if not passing or time.monotonic() - away > OUTAGE_WAIT_S:
                raise
            time.sleep(random.uniform(0.2, 1))
            continue
        if held is not None:
            return held
        away = 0.0
        if time.monotonic() > give_up:
            raise RegistryUnavailableError(
                f"registry {access.shown}: others have been writing for {QUEUE_WAIT_S:g} s, now "
                f"{lease.holder}: try again"
            )
        time.sleep(random.uniform(0.02, 0.2))


class Lease:
    """The lease called `name`, as one writer sees it that wants it or has it."""

    def __init__(self, client: MlflowClient, name: str) -> None:
        self._client, self.name, self.token = client, name, uuid.uuid4().hex
        self._asked: float | None = None  # when it was first asked for, without an answer
        self._seen, self._since = "", 0.0
        self.holder = "somebody"

    def try_acquire(self) -> WriteLock | None:
        """The lock, if it is free; the lease of an owner that is dead is taken out of the way."""
        begun = time.monotonic()
        self._asked = begun if self._asked is None else self._asked
        if self._created():
            return WriteLock(begun + LEASE_S / 2)
        found = models.model_of(self._client, self.name)
        if found is None:
            return None
        owner, now = found.tags.get(_OWNER), time.monotonic()
        if owner is None:  # released while MLflow read it: the model first, then its tags
            return None
        self.holder = found.tags.get(_BY, "somebody")
        if owner == self.token:  # made by a request whose answer was lost, then or later
            if now < self._asked + LEASE_S / 2:
                return WriteLock(self._asked + LEASE_S / 2)
            self.release()
            self.token = uuid.uuid4().hex  # not released, it is a dead owner's
        self._asked = None
        if owner != self._seen:
            self._seen, self._since = owner, now
        elif now - self._since > LEASE_S:
            self.bury(owner)
        return None

    def release(self) -> None:
        """By a name of its own: a request that arrives late or twice cannot end the next owner's
        lease. One that cannot be released runs out."""
        with contextlib.suppress(Exception):
            self._client.rename_registered_model(self.name, f"{self.name} {self.token}")
            self._client.delete_registered_model(f"{self.name} {self.token}")

    def bury(self, owner: str) -> None:
        """Take a dead owner's lease out of the way, unless another successor was quicker."""
        try:
            self._client.rename_registered_model(self.name, f"{self.name} {owner}")
        except Exception as error:
            # On PostgreSQL, of two at one moment: "expected to update 1 row(s); 0 were matched".
            quicker = models.has_code(error, "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST")
            if not quicker and "0 were matched" not in str(error):
                raise
            return
        oldest = datetime.now(UTC) - KEEP_DEAD
        named = f"name LIKE '{self.name} %'"
        for dead in models.all_pages(self._client.search_registered_models, named):
            if dead.last_updated_timestamp / 1000 < oldest.timestamp():
                with contextlib.suppress(Exception):
                    self._client.delete_registered_model(dead.name)

    def _created(self) -> bool:
        try:
            self._client.create_registered_model(
                self.name,
                tags={_OWNER: self.token, _BY: stamp.user_at_host()},
                description="A writer of soa-pipeline is at work; this goes away by itself.",
            )
        except Exception as error:
            # Taken; or it was, and MLflow did not find it any more when it looked by whom.
            if models.has_code(error, "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST"):
                return False
            raise
        return True
