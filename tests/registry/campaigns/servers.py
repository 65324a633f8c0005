"""A PostgreSQL and MLflow's own server on it, of this process's own, to be killed and restarted."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import closing, suppress
from pathlib import Path

USER = "postgres"
"""Who runs PostgreSQL where we are root, which it refuses to be."""
_START_S = 300.0
# The server has processes for jobs of its own, which nobody here gives it.
_PLAIN = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def binaries() -> Path | None:
    """The folder of the newest PostgreSQL of this host: Debian keeps it off the PATH."""
    places = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parts[-3])
    )
    found = str(places[-1]) if places else shutil.which("initdb")
    return Path(found).resolve().parent if found else None


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return int(probe.getsockname()[1])


class PostgreSQL:
    """One with an empty database; `uri` is SQLAlchemy's. Nothing is left after `remove`."""

    def __init__(self, bin: Path) -> None:
        self._bin, self.port = bin, free_port()
        # Not in a folder of ours: another user has to reach it.
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
        """Return once it answers. What was killed may still hold its memory for a moment."""
        command: list[str | Path] = [self._bin / "postgres", "-D", self.folder / "data"]
        for setting in (
            "listen_addresses=127.0.0.1",
            f"port={self.port}",
            f"unix_socket_directories={self.folder}",
            "fsync=off",  # the process is killed, not the host
            "shared_buffers=32MB",
        ):
            command += ["-c", setting]
        end = time.monotonic() + _START_S
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
            ready: list[str | Path] = [
                self._bin / "pg_isready",
                "-q",
                "-h",
                "127.0.0.1",
                "-p",
                str(self.port),
            ]
            if subprocess.run(ready).returncode == 0:
                return
            _require_time(end, self.folder / "log")

    def kill(self) -> None:
        """SIGKILL to the one that all of its processes follow."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def remove(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # its fast shutdown
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class MlflowServer:
    """`mlflow server` on a database; it keeps the files as well."""

    def __init__(self, backend: str, folder: Path) -> None:
        self._backend, self._folder, self._port = backend, folder, free_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return once it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--workers", "1"]
        command += ["--backend-store-uri", self._backend, "--serve-artifacts"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=os.environ | _PLAIN,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + _START_S
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
            except OSError:
                if self._process.poll() is not None:
                    end = 0.0
                _require_time(end, self._folder / "log")
            else:
                return

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def _require_time(end: float, log: Path) -> None:
    if time.monotonic() > end:
        raise SystemExit(f"a server does not start:\n{log.read_text()[-3000:]}")
    time.sleep(0.1)
