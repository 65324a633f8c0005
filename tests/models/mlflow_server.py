"""MLflow as others use it: its client, and a real `mlflow server` to start, kill and stop."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry import Registry

START_S = 300.0
# The server has processes for jobs of its own, which nobody here gives it.
_PLAIN = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return int(probe.getsockname()[1])


def client_of(registry: Registry) -> MlflowClient:
    """MLflow's own client of a registry."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=registry.uri, registry_uri=registry.uri)


class MlflowServer:
    """Answers once it is made. `database`: an SQLite registry with MLflow's tables, which is
    copied; or the URI of a database."""

    def __init__(self, folder: Path, database: Path | str) -> None:
        if isinstance(database, Path):
            shutil.copy(database, folder / "registry.db")
            database = f"sqlite:///{folder}/registry.db"
        port = free_port()
        self.uri, self._folder = f"http://127.0.0.1:{port}", folder
        self._command = [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"),
            *("--port", str(port), "--workers", "1", "--backend-store-uri", database),
            *("--serve-artifacts", "--artifacts-destination", str(folder / "artifacts")),
        ]
        self.start()

    def start(self) -> None:
        """Return once it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=os.environ | _PLAIN,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        self.kill()
        said = (self._folder / "log").read_text()[-3000:]
        raise RuntimeError(f"MLflow's server does not start:\n{said}")

    def stop(self) -> None:
        """It has a child for each worker."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
