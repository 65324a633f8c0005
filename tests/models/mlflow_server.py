"""MLflow itself: its client, and a real `mlflow server` to start, stop and kill."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry import Registry

START_S = 300.0
# The server would start processes for MLflow's own jobs, which no test uses.
_PLAIN = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def free_port() -> int:
    """A port on which nothing listened a moment ago."""
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return int(probe.getsockname()[1])


def client_of(registry: Registry) -> MlflowClient:
    """MLflow's own client of a registry."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=registry.uri, registry_uri=registry.uri)


class MlflowServer:
    """A server of a database that answers as soon as the object is made."""

    def __init__(self, folder: Path, database: str) -> None:
        """`database`: its URI."""
        port = free_port()
        self.uri, self._folder = f"http://127.0.0.1:{port}", folder
        self._command = [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"),
            *("--port", str(port), "--workers", "1", "--backend-store-uri", database),
            *("--serve-artifacts", "--artifacts-destination", str(folder / "artifacts")),
        ]
        self.start()

    def start(self) -> None:
        """Returns once the server answers."""
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
        log_end = (self._folder / "log").read_text()[-3000:]
        raise RuntimeError(f"MLflow's server does not start:\n{log_end}")

    def stop(self) -> None:
        """Stops the server with its worker processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Sends SIGKILL to all of its processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def served_here(folder: Path, database: Path) -> Iterator[str]:
    """The URI of MLflow's server in a thread of this process.

    A process of its own needs seconds to import MLflow. `database` is an SQLite registry, which is
    copied.
    """
    import pytest
    import uvicorn

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of MLflow's imports
        from mlflow.server import handlers
        from mlflow.server.fastapi_app import app
        from mlflow.tracking._model_registry import utils as of_models
        from mlflow.tracking._tracking_service import utils as of_runs

    shutil.copy(database, folder / "registry.db")
    variables = {
        "FILE_STORE": f"sqlite:///{folder}/registry.db",
        "ARTIFACT_ROOT": "mlflow-artifacts:/",
        "SERVE_ARTIFACTS": "true",
        "ARTIFACT_DESTINATION": str(folder / "artifacts"),
    }
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(f"_MLFLOW_SERVER_{name}", value)
        for name in ("_tracking_store", "_model_registry_store", "_artifact_repo"):
            patch.setattr(handlers, name, None)  # forgets the stores of an earlier server
        # The server makes its store the default of this process; the patch undoes that at its end.
        patch.setattr(of_runs, "_tracking_uri", of_runs._tracking_uri)
        patch.setattr(of_models, "_registry_uri", of_models._registry_uri)
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
            patch.setenv(name, variables["FILE_STORE"])
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join()
