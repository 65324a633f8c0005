"""Kills or pauses a writer at each of its writes: all operations, and all their writes in order.

Every writer begins from the same registry, which holds something of every kind. After a kill the
invariants hold, the operation has happened or it has not, and it can be run again. A paused writer
goes on after another writer has done the same operation (or waits for its turn) and collected all
garbage; then both have ended, and the result is there, once.

If a lease replaces the file lock, a writer is paused for longer than the lease, each time before it
asks if it may still write. A pause within one request is not handled (registry/history/lock.py).
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from registry import Annex, Bundle, PromotionRefused, Ref, Registry, RegistryError
from registry.history import lock
from registry.history.event_log import Event
from registry.housekeeping.export_import import export_to, import_from
from registry.housekeeping.garbage import collect
from registry.housekeeping.pushing import push
from registry.housekeeping.removal import remove
from registry.mlflow import find_model, models
from registry.promotion.policy import Policy
from registry.store import upload
from registry.store.bundle_files import read_signature
from registry.trust import read_trusted
from tests.models import bundles
from tests.models.bundles import PASSED
from tests.models.keys import make_keys
from tests.registry.campaigns import invariants, workers, write_points

NAME = "jets"
TARGETS = ("cpu/x86-64-v4", "cuda/sm_90")
# Errors that a writer may get if another one was quicker, or took its files for abandoned.
LOST_RACE = ("no such version", "already: built later", "took it for abandoned", "is missing",
        "No such file", "'active' state", "changed while it was being registered")  # fmt: skip
KILLED, PAUSED = "the killed one", "the paused one"
"""The labels of the first writer of a case; the others come after it."""
TOO_LATE = "nothing more was changed"
_REFUSED = 7  # the exit code of a writer
_STATES = {True: "happened", False: "void", None: "half-way"}  # of `Operation.happened`
POLICY = Policy(approvals=("ada",), reference="release.pem")  # any file will do


class Place:
    """The registry of the campaign, in `folder / "store"`, and files for its operations.

    Version 1 was in production, 2 is (with a target built later), 3 is in staging, 4 was never
    promoted (with another target), and 5 has nothing. There are also incomplete leftovers of three
    killed writers: a registration, an annex and a removal.
    """

    def __init__(self, folder: Path, lease: bool) -> None:
        self.folder, self.lease = folder, lease
        self.root, self._saved = folder / "store", folder / "saved"
        self.cache, self.key, self.public = (
            folder / name for name in ("cache", "release.key", "release.pem")
        )
        self.uri = workers.prepare(folder, 12)
        self.other = f"sqlite:///{folder}/other/registry.db"
        workers.run(self._fill)
        assert _stopped(workers.fork(self._removal_without_files)) == "killed"
        shutil.copytree(self.root, self._saved)

    def begin_again(self) -> None:
        shutil.rmtree(self.root)
        shutil.copytree(self._saved, self.root)

    def registry(self) -> Registry:
        registry = Registry(self.uri)
        if self.lease:
            registry.sqlite = None
        return registry

    def bundle(self, number: int) -> Bundle:
        return Bundle.open(self.folder / "bundles" / str(number))

    def annex(self, name: object, target: str) -> Annex:
        return Annex.open(self.folder / "annexes" / str(name) / target)

    def _fill(self) -> None:
        registry, annexes = Registry(self.uri), self.folder / "annexes"
        make_keys(self.folder, "release")
        for number in range(1, 6):
            registry.register(self.bundle(number), NAME)
            for target in TARGETS:
                bundles.write_annex(annexes / str(number) / target, self.bundle(number), target)
        bundles.write_annex(annexes / "another" / TARGETS[1], self.bundle(4), TARGETS[1], seed=1)
        registry.add_target(registry.find(f"{NAME}/2"), self.annex(2, TARGETS[0]))
        registry.add_target(registry.find(f"{NAME}/4"), self.annex(4, TARGETS[0]))
        for number, alias in ((1, "production"), (2, "production"), (3, "staging")):
            registry.promote(registry.find(f"{NAME}/{number}"), alias, PASSED)

        other = Registry(self.other)
        for number in (6, 7):
            version = other.register(self.bundle(number), NAME)
            bundles.write_annex(annexes / str(number), self.bundle(number), TARGETS[0])
            other.add_target(version, Annex.open(annexes / str(number)))
            other.sign(version, self.key)
            other.promote(other.find(version.ref), "production", PASSED)
        other.fetch(other.find(f"{NAME}/1"), self.folder / "pushed")
        export_to(other, Ref(NAME), self.folder / "export")

        with registry.client(write=True) as client:
            experiment = models.ensure_experiment(registry, client, NAME, NAME)
            upload.upload(client, upload.begin_run(client, experiment, NAME, self.bundle(8)),
                          self.bundle(8))  # fmt: skip
            run = str(registry.find(f"{NAME}/3").run_id)
            upload.upload_annex(client, run, self.annex(3, TARGETS[1]))
        registry.register(self.bundle(9), NAME)

    def _removal_without_files(self) -> None:
        """Removes a version, and is killed after four commits."""
        write_points.stop_at(4, self.root, signal.SIGKILL, lambda _: None)
        remove(Registry(self.uri), Ref(NAME, 6))


@dataclass(frozen=True)
class Operation:
    """An operation of the campaign.

    `run` gets a label that it writes into the history. `happened` is None for half-way, which is
    allowed for an import alone: it consists of registrations and events, each of which is complete.
    """

    run: Callable[[Place, Registry, str], object]
    happened: Callable[[Place, Registry], bool | None]
    kind: str | None = None
    """The kind of event that it leaves."""


def _build(place: Place, registry: Registry, label: str) -> None:
    """The later writer has built other bytes for the same target."""
    annex = place.annex(4 if label in (KILLED, PAUSED) else "another", TARGETS[1])
    registry.add_target(registry.find(f"{NAME}/4"), annex)


def _promote(_: Place, registry: Registry, label: str) -> None:
    version = registry.find(f"{NAME}/4")
    registry.promote(version, "production", PASSED, policies=[label], annexes=TARGETS[:1])


def _refuse(_: Place, registry: Registry, label: str) -> None:
    try:
        registry.promote(registry.find(f"{NAME}/5"), "production", [workers.SLOW], policies=[label])
    except PromotionRefused:
        return
    raise AssertionError("a refused promotion went through")


def _promoted(_: Place, registry: Registry) -> bool:
    version = registry.find(f"{NAME}/4")
    record, aliases = version.promotion("production"), _aliases(registry)
    moved = aliases["production"] == 4
    assert moved == (record is not None) == (aliases["previous"] == 2)
    assert record is None or record.annexes == version.annexes
    return moved


def _rolled_back(_: Place, registry: Registry) -> bool:
    """Two rollbacks lead back to the start."""
    rollbacks = [event for event in _done(registry, "rollback") if event.version in (1, 2)]
    production, previous = (2, 1) if len(rollbacks) % 2 == 0 else (1, 2)
    assert _aliases(registry)["production"] == production
    assert _aliases(registry)["previous"] == previous
    return rollbacks != []


def _pushed(place: Place, registry: Registry) -> bool:
    whole = Bundle.open(place.folder / "pushed")
    for version in registry.versions(NAME):
        if version.digest == whole.digest:
            assert version.annexes.keys() == {TARGETS[0]}
            assert read_signature(registry, version) == whole.signature()
            assert version.origin
            return True
    return False


def _imported(place: Place, registry: Registry) -> bool | None:
    versions = {v.digest: v for v in registry.versions(NAME) if v.origin}
    events = len(_done(registry, "import"))
    exported_events = len(Registry(place.other).history(NAME))
    assert events <= exported_events
    for version in versions.values():
        assert version.annexes.keys() == {TARGETS[0]}
        assert read_signature(registry, version) is not None
    if (len(versions), events) == (2, exported_events):
        return True
    return None if versions or events else False


def _signed(place: Place, registry: Registry) -> bool:
    version = registry.find(f"{NAME}/5")
    bundle = registry.open(version)
    if bundle.signature() is None:
        return False
    registry.require_signature(version, bundle, [read_trusted(place.public)])
    return True


def _policy_is_set(place: Place, registry: Registry) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        stored = registry.policies(NAME, Path(folder))
    assert all(policy.reference is not None for policy in stored)
    return [policy.policy for policy in stored] == [POLICY]


def _collected(place: Place, registry: Registry) -> bool:
    return collect(registry, older_than=timedelta(0), cache=place.cache, dry_run=True) == []


OPERATIONS = {
    "register": Operation(
        lambda place, registry, _: registry.register(place.bundle(10), NAME),
        lambda place, registry: _has(registry, place.bundle(10)),
    ),
    "register the first": Operation(
        lambda place, registry, _: registry.register(place.bundle(10), "tracks"),
        lambda place, registry: "tracks" in {model.name for model in registry.list()},
    ),
    "push": Operation(
        lambda place, registry, _: push(registry, place.folder / "pushed", NAME), _pushed
    ),
    "import": Operation(
        lambda place, registry, _: import_from(registry, place.folder / "export"), _imported
    ),
    "build": Operation(
        _build,
        lambda _, registry: registry.find(f"{NAME}/4").annexes.keys() == set(TARGETS),
    ),
    "sign": Operation(
        lambda place, registry, _: registry.sign(registry.find(f"{NAME}/5"), place.key), _signed
    ),
    "approve": Operation(
        lambda _, registry, label: registry.approve(registry.find(f"{NAME}/4"), "ada", label),
        lambda _, registry: any(e.approver == "ada" for e in _done(registry, "approval")),
        "approval",
    ),
    "policy": Operation(
        lambda place, registry, _: registry.set_policy(POLICY, NAME, place.public),
        _policy_is_set,
    ),
    "alias": Operation(
        lambda _, registry, __: registry.set_alias(registry.find(f"{NAME}/4"), "golden"),
        lambda _, registry: _aliases(registry).get("golden") == 4,
    ),
    "promote": Operation(_promote, _promoted, "promotion"),
    "refusal": Operation(_refuse, lambda _, registry: _done(registry, "refusal") != [], "refusal"),
    "rollback": Operation(
        lambda _, registry, label: registry.rollback(NAME, label), _rolled_back, "rollback"
    ),
    "removal": Operation(
        lambda _, registry, label: remove(registry, Ref(NAME, 4), label),
        lambda _, registry: 4 not in {version.number for version in registry.versions(NAME)},
        "removal",
    ),
    "gc": Operation(
        lambda place, registry, _: collect(registry, older_than=timedelta(0), cache=place.cache),
        _collected,
    ),
}


def _has(registry: Registry, bundle: Bundle) -> bool:
    return bundle.digest in {version.digest for version in registry.versions(NAME)}


def _aliases(registry: Registry) -> dict[str, int]:
    return invariants.aliases_of_model(registry, NAME)


def _done(registry: Registry, kind: str) -> list[Event]:
    return [
        event for event in registry.history(NAME) if (event.kind, event.state) == (kind, "done")
    ]


@dataclass
class Row:
    """The results of one operation: how many writes it has, and the state found after each."""

    operation: str
    kills: Counter[str]
    pauses: Counter[str]
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"  {self.operation:18} killed {self.kills.total():3}: {_listed(self.kills):34} "
            f"paused {self.pauses.total():3}: {_listed(self.pauses):44} {self.seconds:4.0f} s"
        )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))


def run(
    folder: Path,
    say: Callable[[str], None],
    operations: Sequence[str] = tuple(OPERATIONS),
    every: int = 1,
    lease_s: float | None = None,
) -> list[Row]:
    """Each operation at each write, or at each `every`-th. AssertionError if an invariant fails."""
    workers.warm_up(lease_s)
    campaign = _Campaign(Place(folder, lease_s is not None), lease_s)
    rows = []
    for name in operations:
        row, begun = Row(name, Counter(), Counter()), time.monotonic()
        row.kills.update(campaign.at_each(OPERATIONS[name], campaign.killed, every))
        row.pauses.update(campaign.at_each(OPERATIONS[name], campaign.paused, every))
        row.seconds = time.monotonic() - begun
        say(str(row))
        rows.append(row)
    return rows


@dataclass
class _Campaign:
    place: Place
    lease_s: float | None

    def at_each(
        self, operation: Operation, attempt: Callable[[Operation, int], str | None], every: int
    ) -> list[str]:
        """The result for each write, up to the last one that the operation has.

        `attempt` is `killed` or `paused`; it returns None if there is no such write any more.
        """
        results: list[str] = []
        for write in itertools.count(0, every):
            self.place.begin_again()
            try:
                result = attempt(operation, write)
            except BaseException:
                last_write = self.place.folder / "write"
                last_written = last_write.read_text() if last_write.exists() else "none"
                print(f"{attempt.__name__} at write {write}, {last_written}:", file=sys.stderr)
                raise
            if result is None:
                # With a lease, writers are paused where they ask for the lock; `sign` takes no
                # lock.
                without_lock = self.place.lease and attempt == self.paused
                assert results or without_lock, "an operation without a write"
                return results
            results.append(result)
        raise AssertionError("unreachable")

    def killed(self, operation: Operation, write: int) -> str | None:
        """Whether the operation happened, or None if it has fewer writes."""
        worker = self._fork(operation, KILLED, write, signal.SIGKILL)
        if _stopped(worker) != "killed":
            return None
        return self._checked(operation, None)

    def paused(self, operation: Operation, write: int) -> str | None:
        """The result of the paused writer, or None if it has fewer writes."""
        first = self._fork(operation, PAUSED, write, signal.SIGSTOP)
        if _stopped(first) != "paused":
            return None
        second = self._fork(operation, "the one that came", None, signal.SIGSTOP)
        # Time to end, or to come to the lock: two leases if it takes the first one for dead.
        status = _status_within(second, 3 + 2 * (self.lease_s or 0.0))
        os.kill(first, signal.SIGCONT)
        first_result = _stopped(first)
        second_result = _stopped(second) if status is None else _result(status)
        assert {first_result, second_result} <= {"done", "refused"}, (first_result, second_result)
        self._checked(operation, True)
        return f"{first_result} (the other {'waited' if status is None else second_result})"

    def _fork(
        self, operation: Operation, label: str, write: int | None, sign: signal.Signals
    ) -> int:
        def work() -> None:
            registry = self.place.registry()
            registry.versions(NAME)
            last_write = self.place.folder / "write"
            if write is not None:
                paused_lease = self.place.lease and sign == signal.SIGSTOP
                stop = stop_before_questions if paused_lease else write_points.stop_at
                stop(
                    write, self.place.root, sign, lambda description: _put(last_write, description)
                )
            try:
                operation.run(self.place, registry, label)
                if write is None:
                    collect(registry, older_than=timedelta(0), cache=self.place.cache)
            except RegistryError as error:
                if not any(text in str(error) for text in (*LOST_RACE, TOO_LATE)):
                    raise
                os._exit(_REFUSED)

        return workers.fork(work)

    def _checked(self, operation: Operation, must: bool | None) -> str:
        """Checks all invariants; returns whether the operation happened."""
        answer = self.place.folder / "answer"
        workers.run(lambda: _put(answer, self._check(operation, must)))
        return answer.read_text()

    def _check(self, operation: Operation, must: bool | None) -> str:
        place, registry = self.place, self.place.registry()
        happened: bool | None = None
        done: dict[str, str] = {}

        def go_on() -> None:
            """Any write settles open events; then the operation is run again."""
            nonlocal happened
            registry.approve(registry.find(NAME), "the campaign")
            happened = operation.happened(place, registry)
            assert must is None or happened == must, happened
            try:
                operation.run(place, registry, "again")
            except RegistryError as error:
                assert happened is True, error
                assert any(text in str(error) for text in LOST_RACE), error
            else:
                if operation.kind is not None:
                    done["again"] = operation.kind
            assert operation.happened(place, registry) is True

        invariants.check(registry, NAME, place.cache, done, go_on)
        for model in registry.list():
            if model.name != NAME:
                invariants.check_always(registry, model.name, {}, ())
        if place.lease:
            with registry.client() as client:
                lock_model = find_model(client, f"soa-pipeline lock {NAME}")
            assert lock_model is None, "a lease was left behind"
        return _STATES[happened]


def stop_before_questions(
    wanted: int, _: Path, sign: signal.Signals, say: Callable[[str], None]
) -> None:
    """Send `sign` to this process when it asks for the `wanted`-th time if it may write."""
    plain_check, count = lock.WriteLock.check, itertools.count()

    def check(held: lock.WriteLock) -> None:
        if next(count) == wanted:
            say(f"question {wanted}")
            os.kill(os.getpid(), sign)
        plain_check(held)

    lock.WriteLock.check = check  # type: ignore[assignment,method-assign]


def _put(path: Path, text: str) -> None:
    path.write_text(text)


def _stopped(pid: int) -> str:
    """Waits until a child is paused or has ended; how it is."""
    return _result(os.waitpid(pid, os.WUNTRACED)[1])


def _status_within(pid: int, seconds: float) -> int | None:
    """The wait status of a child that ends in so many seconds; None if it is still running."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    return None


def _result(status: int) -> str:
    if os.WIFSTOPPED(status):
        return "paused"
    if os.WIFSIGNALED(status):
        return "killed" if os.WTERMSIG(status) == signal.SIGKILL else "crashed"
    return {0: "done", _REFUSED: "refused"}.get(os.WEXITSTATUS(status), "failed")
