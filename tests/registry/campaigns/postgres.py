"""PostgreSQL behind a real `mlflow server`, both killed with SIGKILL and restarted under load.

    python -m tests.registry.campaigns.postgres --seed 1 --kills 20

Several writers register, build, promote, are refused, roll back, remove and collect, through
http:// and without a pause, while the server is killed and started again, and halfway PostgreSQL
too. An operation may then fail, with a one-line error, and the writer goes on with another. At the
end every writer has to complete an operation, and all invariants of the kill campaign hold, before
and after the next writer has settled what was left open, and after a last collector has run.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.models.mlflow_server import START_S, MlflowServer, free_port
from tests.registry.campaigns import invariants, workers
from tests.registry.campaigns.kill import Campaign

USER = "postgres"
"""The user who runs PostgreSQL if we are root, as PostgreSQL refuses to run as root."""


def binaries() -> Path | None:
    """The folder of this host's newest PostgreSQL, which Debian does not put on the PATH."""
    places = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parts[-3])
    )
    initdb = str(places[-1]) if places else shutil.which("initdb")
    return Path(initdb).resolve().parent if initdb else None


class PostgreSQL:
    """A server with an empty database; `uri` is for SQLAlchemy. `remove` removes its files."""

    def __init__(self, bin: Path) -> None:
        self._bin, self.port = bin, free_port()
        # Not in a folder of ours, as another user must be able to read it.
        self.folder = Path(tempfile.mkdtemp(prefix="soa-postgresql-"))
        self._user = USER if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(self.folder, USER, USER)
        self.uri = f"postgresql+psycopg2://{USER}@127.0.0.1:{self.port}/{USER}"
        self._process: subprocess.Popen[bytes] | None = None
        subprocess.run(
            [bin / "initdb", "-D", self.folder / "data", "-U", USER, "--auth=trust", "--no-sync"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self.folder,
            user=self._user,
            group=self._user,
        )

    def start(self) -> None:
        """Returns once it answers. A killed server may hold its shared memory for a moment."""
        command: list[str | Path] = [self._bin / "postgres", "-D", self.folder / "data"]
        for setting in (
            "listen_addresses=127.0.0.1",
            f"port={self.port}",
            f"unix_socket_directories={self.folder}",
            "fsync=off",  # only the process is killed, not the host
            "shared_buffers=32MB",
        ):
            command += ["-c", setting]
        end = time.monotonic() + START_S
        while True:
            if self._process is None or self._process.poll() is not None:
                with (self.folder / "log").open("ab") as log:
                    self._process = subprocess.Popen(
                        command,
                        stdout=log,
                        stderr=log,
                        cwd=self.folder,
                        start_new_session=True,
                        user=self._user,
                        group=self._user,
                    )
            ready = f"-q -h 127.0.0.1 -p {self.port}".split()
            if subprocess.run([self._bin / "pg_isready", *ready]).returncode == 0:
                return
            if time.monotonic() > end:
                log_end = (self.folder / "log").read_text()[-3000:]
                raise SystemExit(f"PostgreSQL does not start:\n{log_end}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Sends SIGKILL to the main process; its children then end too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def remove(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # its signal for a fast shutdown
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Restarts(Campaign):
    """Writers that go on while the server and its database are killed and started again."""

    writers: list[int] = field(default_factory=list)

    def run(self, kills: int, writers: int) -> Counter[str]:
        workers.warm_up(self.lease_s)
        programs = binaries()
        if programs is None:
            raise SystemExit("no PostgreSQL on this host: on Debian, apt install postgresql")
        database = PostgreSQL(programs)
        server: MlflowServer | None = None
        try:
            database.start()
            server = MlflowServer(self.folder, database.uri)
            self.prepare(server.uri)
            self.writers = [workers.fork(partial(self._write, i)) for i in range(writers)]
            self._kill(database, server, kills)
            self._stop()
            workers.run(self.check)
        finally:
            for pid in self.writers:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if server is not None:
                server.kill()
            database.remove()
        return self._counts()

    def _kill(self, database: PostgreSQL, server: MlflowServer, kills: int) -> None:
        """Kills under load: between two kills, writers complete operations."""
        chance = random.Random(self.seed)
        for number in range(kills):
            self._wait_for_work()
            time.sleep(chance.uniform(0, 1))
            if number == kills // 2:
                database.kill()
                time.sleep(chance.uniform(0, 1))
                database.start()
                self.say("PostgreSQL killed and restarted")
                self._wait_for_work()
            server.kill()
            time.sleep(chance.uniform(0, 2))
            server.start()
            self.say(f"server killed and restarted {number + 1} times")
        self._wait_for_work()

    def _wait_for_work(self) -> None:
        """Returns once as many more operations have returned as there are writers."""
        begun, end = len(self.journal()), time.monotonic() + 600
        while sum("label" in entry for entry in self.journal()[begun:]) < len(self.writers):
            for pid in self.writers:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self.writers.remove(pid)
                    raise SystemExit("a writer ended by itself: see above")
            if time.monotonic() > end:
                raise SystemExit("no writer gets anything done any more")
            time.sleep(0.1)

    def _write(self, number: int) -> None:
        for _ in self.operations(number):
            if (self.folder / "stop").exists():
                return

    def _stop(self) -> None:
        (self.folder / "stop").touch()
        while self.writers:
            _, status = os.waitpid(self.writers.pop(), 0)
            if status:
                raise SystemExit("a writer failed: see above")

    def _counts(self) -> Counter[str]:
        """The counts of the campaign; says how often each error came."""
        messages = Counter(entry["said"] for entry in self.journal() if "said" in entry)
        for message, count in messages.items():
            self.say(f"said {count} times: {message}")
        return self.counts()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20, help="Of the server; one of PostgreSQL.")
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--lease", type=float, default=30.0, metavar="S", help="For lock.LEASE_S.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soa-postgres-") as folder:
        begun = time.monotonic()
        campaign = Restarts(
            Path(folder),
            options.seed,
            lambda text: print(text, file=sys.stderr),
            lease_s=options.lease,
        )
        counts = campaign.run(options.kills, options.writers)
    print(f"seed {options.seed}: {options.writers} writers, server killed {options.kills} times, "
          f"PostgreSQL once, {time.monotonic() - begun:.0f} s")  # fmt: skip
    for counted, count in sorted(counts.items()):
        print(f"  {count:6} {counted}")
    print("held at the end:", *invariants.ALWAYS, sep="\n  ")
    print("held once settled:", *invariants.SETTLED, sep="\n  ")
    print("held once collected:", *invariants.CLEAN, sep="\n  ")


if __name__ == "__main__":
    main()
