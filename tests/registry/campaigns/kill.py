"""Kill campaign: two writers on one registry, killed with SIGKILL in the middle of what they do.

    python -m tests.registry.campaigns.kill --seed 1 --kills 200

Each writer registers, promotes, is refused, rolls back, sets aliases and approves, without a pause.
After every kill a new writer takes the place of the dead one, and after every tenth both are killed
and all invariants are checked, before and after the next writer has settled what was left open.

`--registry URI` takes a tracking server; `--lease 2` then keeps the wait for a dead writer short.
The seed decides the operations and the delays; what a kill hits depends on the machine's timing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from registry import Bundle, PromotionRefused, Registry, RegistryError, RegistryUnavailableError
from tests.registry.campaigns import invariants, workers

BUNDLES = 40
ROUND = 10


def operation(
    registry: Registry, name: str, choice: random.Random, folder: Path, label: str
) -> list[str]:
    """One operation; returns the kind of event it must have left, and a digest if it registered."""
    versions = registry.versions(name)
    version = choice.choice(versions)
    match choice.choices(
        ["register", "production", "staging", "refusal", "rollback", "alias", "approval"],
        [25, 30, 10, 5, 20, 5, 5],
    )[0]:
        case "register":
            bundle = Bundle.open(folder / "bundles" / str(choice.randrange(BUNDLES)))
            return ["", registry.register(bundle, name).digest]
        case "refusal":
            try:
                registry.promote(version, "production", [workers.SLOW], policies=[label])
            except PromotionRefused:
                return ["refusal", ""]
            raise AssertionError("a refused promotion went through")
        case "rollback":
            try:
                registry.rollback(name, label)
            except RegistryUnavailableError:
                raise
            except RegistryError as error:
                assert "nothing to roll back to" in str(error), error
                return ["", ""]
            return ["rollback", ""]
        case "alias":
            registry.set_alias(version, choice.choice(["golden", "candidate"]))
            return ["", ""]
        case "approval":
            registry.approve(version, "somebody", label)
            return ["approval", ""]
        case alias:
            registry.promote(version, alias, workers.PASSED, policies=[label])
            return ["promotion", ""]


@dataclass
class Writer:
    """A child at work. `pipe` gets B when an operation begins and E when it has ended."""

    pid: int
    pipe: int
    busy: bool = False

    def read(self, timeout: float) -> bytes:
        ready, _, _ = select.select([self.pipe], [], [], timeout)
        found = os.read(self.pipe, 4096) if ready else b""
        self.busy = found.endswith(b"B") if found else self.busy
        return found


@dataclass
class Campaign:
    folder: Path
    seed: int
    say: Callable[[str], None]
    registry: str | None = None
    lease_s: float | None = None
    name: str = field(default_factory=workers.new_name)
    writers: list[Writer] = field(default_factory=list)
    started: int = 0
    kills: int = 0
    inside: int = 0
    checks: int = 0

    def run(self, kills: int) -> Counter[str]:
        workers.warm_up(self.lease_s)
        self.uri = workers.prepare(self.folder, BUNDLES, self.registry)
        self.journals = self.folder / "journals"
        self.journals.mkdir()
        workers.run(self._first_version)
        chance = random.Random(self.seed)
        length = 0.2
        while self.kills < kills:
            while len(self.writers) < 2:
                self.writers.append(self._start())
            victim = chance.choice(self.writers)
            while b"B" not in victim.read(60):  # it connects first
                self._require_alive(victim)
            time.sleep(chance.uniform(0, 2 * length))
            self._kill(victim)
            if self.kills % ROUND == 0 or self.kills >= kills:
                for writer in list(self.writers):
                    self._kill(writer)
                workers.run(self._check)
                self.checks += 1
                length = self._mean_length() or 2 * length  # none returned: killed too soon
                self.say(f"{self.kills} kills, {self.inside} inside an operation: all holds")
        return self._counts()

    def _first_version(self) -> None:
        bundle = Bundle.open(self.folder / "bundles" / "0")
        Registry(self.uri).register(bundle, self.name)

    def _start(self) -> Writer:
        number, self.started = self.started, self.started + 1
        read, write = os.pipe()

        def work() -> None:
            os.close(read)
            registry, choice = Registry(self.uri), random.Random(f"{self.seed}/{number}")
            registry.versions(self.name)
            with (self.journals / str(number)).open("a", buffering=1) as journal:
                for count in range(1_000_000):
                    label = f"writer {number} operation {count}"
                    os.write(write, b"B")
                    begun = time.monotonic()
                    try:
                        kind, digest = operation(registry, self.name, choice, self.folder, label)
                    except RegistryUnavailableError:
                        if self.lease_s is None:
                            raise
                        os.write(write, b"E")  # slower than the short lease: stopped, as it should
                        continue
                    done = {"label": label, "kind": kind, "digest": digest}
                    journal.write(json.dumps(done | {"s": time.monotonic() - begun}) + "\n")
                    os.write(write, b"E")

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

    def _journal(self) -> list[dict[str, str | float]]:
        # A line is one write: a kill leaves it whole or out.
        files = sorted(self.journals.iterdir())
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def _mean_length(self) -> float:
        lengths = [float(entry["s"]) for entry in self._journal()]
        return sum(lengths) / max(len(lengths), 1)

    def _check(self) -> None:
        registry, entries = Registry(self.uri), self._journal()
        done = {str(e["label"]): str(e["kind"]) for e in entries if e["kind"]}
        registered = [str(e["digest"]) for e in entries if e["digest"]]
        invariants.check_always(registry, self.name, done, registered)
        left_open = [e for e in invariants._raw(registry, self.name) if e.state == "open"]
        foreseen = {event.number: event.state for event in registry.history(self.name)}
        while True:  # any writer settles
            try:
                registry.approve(registry.find(self.name), "the campaign")
                break
            except RegistryUnavailableError:
                if self.lease_s is None:
                    raise
        invariants.check_settled(registry, self.name)
        invariants.check_always(registry, self.name, done, registered)
        settled = {event.number: event.state for event in invariants._raw(registry, self.name)}
        assert {n: settled[n] for n in foreseen} == foreseen
        with (self.folder / "left_open").open("a") as file:
            file.writelines(f"{event.kind} {settled[event.number]}\n" for event in left_open)

    def _counts(self) -> Counter[str]:
        found: Counter[str] = Counter()

        def count() -> None:
            events = Registry(self.uri).history(self.name)
            done = {str(entry["label"]) for entry in self._journal()}
            kinds = Counter(f"{event.kind}: {event.state}" for event in events)
            kinds["completed for a killed writer"] = sum(
                event.state == "done" and invariants.label_of(event).startswith("writer")
                and invariants.label_of(event) not in done for event in events
            )  # fmt: skip
            kinds["versions"] = len(Registry(self.uri).versions(self.name))
            (self.folder / "counts.json").write_text(json.dumps(kinds))

        workers.run(count)
        found.update(json.loads((self.folder / "counts.json").read_text()))
        found["operations that returned"] = len(self._journal())
        found["left open at a check"] = len((self.folder / "left_open").read_text().splitlines())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=200)
    workers.add_options(parser)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soa-kill-") as folder:
        begun = time.monotonic()
        campaign = Campaign(
            Path(folder),
            asked.seed,
            lambda text: print(text, file=sys.stderr),
            asked.registry,
            asked.lease,
        )
        try:
            counts = campaign.run(asked.kills)
        finally:
            for writer in campaign.writers:
                os.kill(writer.pid, signal.SIGKILL)
                os.waitpid(writer.pid, 0)
    print(f"seed {asked.seed}: {campaign.kills} kills, {campaign.inside} inside an operation, "
          f"{campaign.checks} checks, {time.monotonic() - begun:.0f} s")  # fmt: skip
    for what, count in sorted(counts.items()):
        print(f"  {count:6} {what}")
    print("held at every check:", *invariants.ALWAYS, sep="\n  ")
    print("held once settled:", *invariants.SETTLED, sep="\n  ")


if __name__ == "__main__":
    main()
