"""Kill campaign: writers on one registry, killed with SIGKILL in the middle of their operations.

    python -m tests.registry.campaigns.kill --seed 1 --kills 200
    python -m tests.registry.campaigns.kill --each promote --each rollback --kills 0

In the first part a writer is killed at each of its writes, one operation and one write after the
other: see `each_write`. In the second part two writers run at once and are killed at random
moments. Each of them registers, builds targets, promotes, is refused, rolls back, sets aliases,
approves, removes versions and collects garbage, without a pause. The collector takes everything
that no version has yet, so it often disturbs the other writer. After every kill a new writer
replaces the dead one. After every tenth kill both are killed, and all invariants are checked: at
once, and again after the next writer has settled what was left open and a last collector has run.

`--registry URI` takes a tracking server, for the second part alone. With `--lease 4` the first part
has a lease in place of the file lock, and a writer waits so many seconds for a dead one. The seed
decides the operations and the delays; at which step a kill hits depends on the machine's timing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from registry import (
    Annex,
    Bundle,
    PromotionRefused,
    Ref,
    Registry,
    RegistryError,
    RegistryUnavailableError,
)
from registry.housekeeping.garbage import collect
from registry.housekeeping.removal import remove
from registry.version import Version
from tests.models import bundles
from tests.models.bundles import PASSED
from tests.registry.campaigns import each_write, invariants, workers

BUNDLES = 40
ROUND = 10


TARGETS = ("cpu/x86-64-v4", "cuda/sm_90")
SHARES = {
    "register": 22, "build": 15, "production": 22, "staging": 6, "refusal": 4, "rollback": 14,
    "alias": 3, "approval": 4, "removal": 7, "gc": 3,
}  # fmt: skip
# Errors that an operation may get if the other writer has removed its version or files.
IN_THE_WAY = ("no such version", "has no versions", "took it for abandoned", "is missing",
              "No such file", "already: built later", "'active' state")  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One random operation of a writer on the model `name`; the history gets its label."""

    registry: Registry
    name: str
    choice: random.Random
    folder: Path
    label: str

    def run(self) -> dict[str, str]:
        """Runs the operation.

        Returns the kind of event that it must have left, and what it registered, built or removed.
        """
        kind = self.choice.choices(list(SHARES), list(SHARES.values()))[0]
        try:
            return self._run(kind)
        except RegistryError as error:
            if not any(text in str(error) for text in IN_THE_WAY):
                raise
            return {"refused": kind}

    def _run(self, kind: str) -> dict[str, str]:
        registry, choice = self.registry, self.choice
        seed = choice.randrange(BUNDLES)
        versions = registry.versions(self.name)
        if kind == "register" or not versions:
            bundle = Bundle.open(self.folder / "bundles" / str(seed))
            return {"registered": registry.register(bundle, self.name).digest}
        version = choice.choice(versions)
        match kind:
            case "build":
                target = choice.choice(TARGETS)
                annex = Annex.open(self.folder / "annexes" / version.digest / target)
                registry.add_target(version, annex)
                return {"built": annex.digest}
            case "removal":
                return self._remove(
                    choice.choice([other for other in versions if not other.aliases] or [version])
                )
            case "gc":
                collect(registry, older_than=timedelta(0), cache=self.folder / "cache")
                return {}
            case "refusal":
                return self._be_refused(version)
            case "rollback":
                return self._roll_back()
            case "alias":
                registry.set_alias(version, choice.choice(["golden", "candidate"]))
                return {}
            case "approval":
                registry.approve(version, "somebody", self.label)
                return {"kind": "approval"}
            case alias:  # "production" or "staging"
                registry.promote(version, alias, PASSED, policies=[self.label])
                return {"kind": "promotion"}

    def _remove(self, version: Version) -> dict[str, str]:
        allowed = (f"{version.ref} is @", IN_THE_WAY[0])
        ref = Ref(version.name, version.number)
        if _refused(lambda: remove(self.registry, ref, self.label), allowed):
            return {}
        return {"kind": "removal", "removed": version.ref}

    def _be_refused(self, version: Version) -> dict[str, str]:
        try:
            self.registry.promote(version, "production", [workers.SLOW], policies=[self.label])
        except PromotionRefused:
            return {"kind": "refusal"}
        raise AssertionError("a refused promotion went through")

    def _roll_back(self) -> dict[str, str]:
        allowed = ("nothing to roll back to",)
        if _refused(lambda: self.registry.rollback(self.name, self.label), allowed):
            return {}
        return {"kind": "rollback"}


def _refused(operation: Callable[[], object], allowed: Sequence[str]) -> bool:
    """Whether the operation was refused for one of the allowed reasons."""
    try:
        operation()
    except RegistryUnavailableError:
        raise
    except RegistryError as error:
        assert any(reason in str(error) for reason in allowed), error
        return True
    return False


@dataclass
class Writer:
    """A child that writes. `pipe` gets B when an operation begins and E when it has ended."""

    pid: int
    pipe: int
    busy: bool = False

    def read(self, timeout: float) -> bytes:
        """What came through the pipe, or nothing after `timeout` seconds or at its end."""
        ready, _, _ = select.select([self.pipe], [], [], timeout)
        marks = os.read(self.pipe, 4096) if ready else b""
        if marks:
            self.busy = marks.endswith(b"B")
        return marks


@dataclass
class Campaign:
    """Writers on one model, each with a journal of its operations."""

    folder: Path
    seed: int
    say: Callable[[str], None]
    registry: str | None = None
    lease_s: float | None = None
    name: str = field(default_factory=workers.new_name)

    def prepare(self, uri: str | None) -> None:
        """Makes bundles, their annexes, a registry unless `uri` names one, and a first version."""
        self.uri = workers.prepare(self.folder, BUNDLES, uri)
        for place in sorted((self.folder / "bundles").iterdir()):
            bundle = Bundle.open(place)
            for target in TARGETS:
                bundles.write_annex(
                    self.folder / "annexes" / bundle.digest / target, bundle, target
                )
        self.journals = self.folder / "journals"
        self.journals.mkdir()
        first = Bundle.open(self.folder / "bundles" / "0")

        def register() -> None:
            Registry(self.uri).register(first, self.name)

        workers.run(register)

    def operations(self, number: int) -> Iterator[bool]:
        """Runs random operations with a journal; yields True before each of them, False after it.

        With a lease, one may fail with an error of one line: its server is away, or it was slower
        than the lease.
        """
        registry, choice = Registry(self.uri), random.Random(f"{self.seed}/{number}")
        registry.versions(self.name)
        with (self.journals / str(number)).open("a", buffering=1) as journal:
            for count in itertools.count():
                label, begun = f"writer {number} operation {count}", time.monotonic()
                yield True
                try:
                    effects = Turn(registry, self.name, choice, self.folder, label).run()
                    seconds = time.monotonic() - begun
                    entry: dict[str, Any] = {"label": label, "s": seconds} | effects
                except RegistryUnavailableError as error:
                    assert self.lease_s is not None and "\n" not in str(error), error
                    entry = {"said": str(error)}
                    time.sleep(0.2)
                journal.write(json.dumps(entry) + "\n")
                yield False

    def settle(self, registry: Registry) -> None:
        """Writes something: any write settles open events. A writer may be slower than a lease."""
        try:
            if not registry.versions(self.name):
                registry.register(Bundle.open(self.folder / "bundles" / "0"), self.name)
            registry.approve(registry.find(self.name), "the campaign")
        except RegistryUnavailableError:
            if self.lease_s is None:
                raise
            self.settle(registry)

    def check(self) -> None:
        """Checks all invariants while nobody writes, and saves counts. A child does this."""
        registry, entries = Registry(self.uri), self.journal()
        invariants.check(
            registry,
            self.name,
            self.folder / "cache",
            {entry["label"]: entry["kind"] for entry in entries if "kind" in entry},
            partial(self.settle, registry),
            registered=[entry["registered"] for entry in entries if "registered" in entry],
            built=[entry["built"] for entry in entries if "built" in entry],
            removed=[entry["removed"] for entry in entries if "removed" in entry],
        )
        events = registry.history(self.name)
        counts = Counter(f"{event.kind}: {event.state}" for event in events)
        counts["events, in one order"] = len(events)
        counts["versions"] = len(registry.versions(self.name))
        (self.folder / "counts.json").write_text(json.dumps(counts))

    def journal(self) -> list[dict[str, Any]]:
        """The entries of all journals; a line that a kill cut off is left out."""
        files = sorted(self.journals.iterdir())
        lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def counts(self) -> Counter[str]:
        """What the last `check` counted, and the operations until now."""
        counts = Counter(json.loads((self.folder / "counts.json").read_text()))
        entries = self.journal()
        counts["operations that returned"] = sum("label" in entry for entry in entries)
        counts["refused, for the other was in the way"] = sum("refused" in e for e in entries)
        counts["operations that failed in one line"] = sum("said" in entry for entry in entries)
        return counts


@dataclass
class Kills(Campaign):
    """Two writers, killed at random moments; `inside` counts the kills within an operation."""

    writers: list[Writer] = field(default_factory=list)
    started: int = 0
    kills: int = 0
    inside: int = 0
    checks: int = 0

    def run(self, kills: int) -> Counter[str]:
        workers.warm_up(self.lease_s)
        self.prepare(self.registry)
        chance = random.Random(self.seed)
        length = 0.2  # seconds of an operation, measured later
        while self.kills < kills:
            while len(self.writers) < 2:
                self.writers.append(self._start())
            victim = chance.choice(self.writers)
            while b"B" not in victim.read(60):  # first it connects
                self._require_alive(victim)
            time.sleep(chance.uniform(0, 2 * length))
            self._kill(victim)
            if self.kills % ROUND == 0 or self.kills >= kills:
                for writer in list(self.writers):
                    self._kill(writer)
                workers.run(self.check)
                self.checks += 1
                length = self._mean_length() or 2 * length  # 0: all were killed too soon
                self.say(f"{self.kills} kills, {self.inside} inside an operation: all holds")
        return self.counts()

    def _start(self) -> Writer:
        number, self.started = self.started, self.started + 1
        read, write = os.pipe()

        def work() -> None:
            os.close(read)
            for begins in self.operations(number):
                os.write(write, b"B" if begins else b"E")

        pid = workers.fork(work)
        os.close(write)
        return Writer(pid, read)

    def _kill(self, writer: Writer) -> None:
        self._require_alive(writer)
        os.kill(writer.pid, signal.SIGKILL)
        os.waitpid(writer.pid, 0)
        while writer.read(0):
            pass
        os.close(writer.pipe)
        self.writers.remove(writer)
        self.kills += 1
        self.inside += writer.busy

    def _require_alive(self, writer: Writer) -> None:
        done, status = os.waitpid(writer.pid, os.WNOHANG)
        if done:
            self.writers.remove(writer)
            raise SystemExit(f"a writer ended by itself, with status {status}: see above")

    def _mean_length(self) -> float:
        lengths = [float(entry["s"]) for entry in self.journal() if "s" in entry]
        return sum(lengths) / max(len(lengths), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=200, help="At random moments.")
    parser.add_argument("--each", action="append", choices=each_write.OPERATIONS)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="Of the writes.")
    workers.add_options(parser)
    options = parser.parse_args()
    begun = time.monotonic()
    if options.registry is None:
        at_each_write(options.each or list(each_write.OPERATIONS), options.every, options.lease)
    if options.kills:
        at_random(options.seed, options.kills, options.registry, options.lease)
    print("held at every check:", *invariants.ALWAYS, sep="\n  ")
    print("held once settled:", *invariants.SETTLED, sep="\n  ")
    print("held once collected:", *invariants.CLEAN, sep="\n  ")
    print(f"{time.monotonic() - begun:.0f} s")


def at_each_write(operations: Sequence[str], every: int, lease_s: float | None) -> None:
    with tempfile.TemporaryDirectory(prefix="soa-kill-") as folder:
        rows = each_write.run(Path(folder), print, operations, every, lease_s)
    kills = sum(row.kills.total() for row in rows)
    pauses = sum(row.pauses.total() for row in rows)
    print(f"{len(rows)} operations: killed at {kills} writes, paused at {pauses}: all holds")


def at_random(seed: int, kills: int, registry: str | None, lease_s: float | None) -> None:
    with tempfile.TemporaryDirectory(prefix="soa-kill-") as folder:
        begun = time.monotonic()
        campaign = Kills(
            Path(folder), seed, lambda text: print(text, file=sys.stderr), registry, lease_s
        )
        try:
            counts = campaign.run(kills)
        finally:
            for writer in campaign.writers:
                os.kill(writer.pid, signal.SIGKILL)
                os.waitpid(writer.pid, 0)
    print(f"seed {seed}: {campaign.kills} kills, {campaign.inside} inside an operation, "
          f"{campaign.checks} checks, {time.monotonic() - begun:.0f} s")  # fmt: skip
    for counted, count in sorted(counts.items()):
        print(f"  {count:6} {counted}")


if __name__ == "__main__":
    main()
