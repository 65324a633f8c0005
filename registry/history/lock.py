"""The write lock: only one process at a time promotes, rolls back or adds versions of a model.

An SQLite registry is protected by a file lock next to it (`registry.db.lock`, flock). It is
exclusive between the threads and processes of a host, and the kernel releases it when its holder
dies in any way. Between hosts it works if flock works on that file system; so does SQLite itself.

Every other registry (a tracking server, PostgreSQL, MySQL) is protected by a lease. It uses the one
operation of MLflow in which only one caller can succeed: to create a registered model with a given
name. While the model "soa-pipeline lock NAME" exists, its owner writes and the others wait:

- Two owners never write at the same time if no single request of an owner takes longer than
  LEASE_S / 2. An owner writes nothing later than LEASE_S / 2 after it asked: it ends with an error.
- A waiting process that has seen the same lease for LEASE_S, by its own clock, takes the owner for
  dead; clocks of different hosts are never compared. It renames the dead lease to a name that
  contains the owner's token: only one of several successors can, and never for a newer lease.
- MLflow has no conditional write. So a request of a dead owner that the network delivers later than
  LEASE_S still has its effect; the next writer finds the alias moved and records it in the history.
- MLflow's client repeats a request that a server did not answer, so a change could be made twice.
  Therefore an owner sends each request once, and gives up after LEASE_S / 4 without a connection or
  without an answer. Then the writer ends with an error, and the next one completes or undoes its
  work. A process that still waits for a lease tries for longer: OUTAGE_WAIT_S.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from registry import stamp
from registry.errors import RegistryUnavailableError
from registry.mlflow import fetch_all_pages, find_model, has_code, send_once, translate_error

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry.mlflow import Access

LEASE_S = 30.0
QUEUE_WAIT_S = 120.0
"""How long a writer waits for the lock: longer than LEASE_S, because an owner may have died."""
OUTAGE_WAIT_S = 60.0
"""How long a writer that has changed nothing yet waits for a server that does not answer."""
KEEP_DEAD = timedelta(hours=1)
"""How long a renamed dead lease is kept: a slower successor may still try the same new name."""

_OWNER = "owner"
_BY = "by"


@dataclass(frozen=True)
class WriteLock:
    """The right to write.

    `until`: the end of this right, as `time.monotonic()` of this process counts; None for a file
    lock, which does not end by itself.
    """

    until: float | None

    def check(self) -> None:
        """Raise RegistryUnavailableError if another writer may have begun.

        To be called before each write.
        """
        if self.until is not None and time.monotonic() > self.until:
            raise RegistryUnavailableError(
                f"the registry took longer than {LEASE_S / 2:g} s, and another writer may have "
                "begun: nothing more was changed, run the command again"
            )


def write_lock(
    access: Access, client: MlflowClient, name: str
) -> contextlib.AbstractContextManager[WriteLock]:
    """Return a block that waits for the lock on all data of model `name`, and holds it.

    Such blocks must not be nested. Raises RegistryUnavailableError if others keep the lock.
    """
    if access.sqlite is None:
        return _hold_lease(access, client, f"soa-pipeline lock {name}")
    return _hold_file_lock(access.sqlite, access.shown)


@contextlib.contextmanager
def _hold_file_lock(database: Path, shown: str) -> Iterator[WriteLock]:
    """Wait for the file lock next to an SQLite registry, and hold it in the block.

    `shown`: the registry's name in an error.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(f"{database}.lock", timeout=QUEUE_WAIT_S)
    try:
        acquired = lock.acquire()
    except Timeout:
        raise RegistryUnavailableError(
            f"registry {shown}: another process has been writing for {QUEUE_WAIT_S:g} s "
            f"and holds {database}.lock: stop it, or try again"
        ) from None
    with acquired:
        yield WriteLock(until=None)


@contextlib.contextmanager
def _hold_lease(access: Access, client: MlflowClient, name: str) -> Iterator[WriteLock]:
    """Wait for the lease called `name`, and hold it in the block until it expires."""
    with send_once(LEASE_S / 4):
        lease = Lease(client, name)
        lock = _wait_for_lease(access, lease)
        try:
            yield lock
        finally:
            # After `until` the lease may already belong to another writer: do not touch it.
            if lock.until is not None and time.monotonic() < lock.until:
                lease.release()


def _wait_for_lease(access: Access, lease: Lease) -> WriteLock:
    """Wait until the lease is acquired; short outages of the server are waited for, too.

    Raises RegistryUnavailableError if other writers keep it, or the error of a long outage.
    """
    deadline = time.monotonic() + QUEUE_WAIT_S
    silent_since: float | None = None  # None: the server answered the last request
    while True:
        try:
            lock = lease.try_acquire()
        except Exception as error:
            if silent_since is None:
                silent_since = time.monotonic()
            temporary = isinstance(translate_error(error, access.shown), RegistryUnavailableError)
            if not temporary or time.monotonic() - silent_since > OUTAGE_WAIT_S:
                raise
            time.sleep(random.uniform(0.2, 1))  # random: the waiting writers ask in turns
            continue
        if lock is not None:
            return lock
        silent_since = None
        if time.monotonic() > deadline:
            raise RegistryUnavailableError(
                f"registry {access.shown}: other writers have had its lock for {QUEUE_WAIT_S:g} s, "
                f"now {lease.holder}: try again"
            )
        time.sleep(random.uniform(0.02, 0.2))


class Lease:
    """The lease called `name`, for one writer that waits for it or holds it."""

    def __init__(self, client: MlflowClient, name: str) -> None:
        self._client, self.name, self.token = client, name, uuid.uuid4().hex
        self._asked_at: float | None = None  # time of the first request without a clear answer
        self._seen_owner, self._seen_since = "", 0.0  # who has the lease, and since when we know
        self.holder = "somebody"  # for messages: who has the lease

    def try_acquire(self) -> WriteLock | None:
        """Return the lock if it is free, else None. The lease of a dead owner is renamed."""
        start = time.monotonic()
        self._asked_at = start if self._asked_at is None else self._asked_at
        if self._try_to_create():
            return WriteLock(until=start + LEASE_S / 2)
        lease = find_model(self._client, self.name)
        if lease is None:
            return None
        owner, now = lease.tags.get(_OWNER), time.monotonic()
        if owner is None:  # released after MLflow read the model, but before it read its tags
            return None
        self.holder = lease.tags.get(_BY, "somebody")
        if owner == self.token:  # our own request created it, and its answer was lost
            if now < self._asked_at + LEASE_S / 2:
                return WriteLock(until=self._asked_at + LEASE_S / 2)
            self.release()
            self.token = uuid.uuid4().hex  # if the release failed, it counts as a dead owner's
        self._asked_at = None
        if owner != self._seen_owner:
            self._seen_owner, self._seen_since = owner, now
        elif now - self._seen_since > LEASE_S:
            self.bury(owner)
        return None

    def release(self) -> None:
        """End the lease: rename it to a name with its token, then delete it.

        The other name keeps a request that arrives late or twice from ending the next owner's
        lease. A failure is ignored: then the lease expires.
        """
        with contextlib.suppress(Exception):
            self._client.rename_registered_model(self.name, f"{self.name} {self.token}")
            self._client.delete_registered_model(f"{self.name} {self.token}")

    def bury(self, owner: str) -> None:
        """Rename a dead owner's lease, so that a new one can be created.

        If another successor was faster, nothing is done. Otherwise leases that were renamed longer
        than KEEP_DEAD ago are deleted.
        """
        try:
            self._client.rename_registered_model(self.name, f"{self.name} {owner}")
        except Exception as error:
            # PostgreSQL, if two processes do it at once: "expected to update 1 row(s); 0 were
            # matched".
            renamed = has_code(error, "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST")
            if not renamed and "0 were matched" not in str(error):
                raise
            return
        oldest_kept = datetime.now(UTC) - KEEP_DEAD
        dead_leases = f"name LIKE '{self.name} %'"
        for dead in fetch_all_pages(self._client.search_registered_models, dead_leases):
            if dead.last_updated_timestamp / 1000 < oldest_kept.timestamp():
                with contextlib.suppress(Exception):
                    self._client.delete_registered_model(dead.name)

    def _try_to_create(self) -> bool:
        """Try to create the lease; return False if another writer has it."""
        try:
            self._client.create_registered_model(
                self.name,
                tags={_OWNER: self.token, _BY: stamp.user_at_host()},
                description="A writer of soa-pipeline is at work; this goes away by itself.",
            )
        except Exception as error:
            # The lease exists; or it existed, but was gone when MLflow read it for its message.
            if has_code(error, "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST"):
                return False
            raise
        return True
