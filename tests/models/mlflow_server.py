"""A real `mlflow server`, which keeps the files too, as a process to start and to stop."""

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

import pytest


class MlflowServer:
    """`database`: an SQLite registry with MLflow's tables, which is copied."""

    def __init__(self, folder: Path, database: Path) -> None:
        shutil.copy(database, folder / "registry.db")
        with closing(socket.create_server(("127.0.0.1", 0))) as probe:
            port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{folder}/registry.db"]
        command += ["--artifacts-destination", str(folder / "artifacts")]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait(folder / "log")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """It has a child for each worker."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def _wait(self, log: Path) -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
            except OSError:
                time.sleep(0.2)
            else:
                return
        pytest.fail(f"MLflow's server does not start:\n{log.read_text()}")
