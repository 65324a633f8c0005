"""A real Triton on this host: started, waited for, and stopped, each within a time limit."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from serving.errors import ServerError
from serving.local.binary import TritonBinary, find_triton
from serving.local.process import Started, free_ports
from serving.metrics import get, model_counters

_STOP_S = 15.0
_POLL_S = 0.05
_REASONS = (r"failed to load '[^']*' version \d+: [^\n\\]*", r"Socket '[^']*' already in use")

_NO_GPU = r"initialize NVML|CudaDriverHelper"  # what every start without a GPU says


@dataclass(frozen=True)
class Ports:
    """0 takes a free one."""

    grpc: int = 0
    http: int = 0
    metrics: int = 0


@dataclass(frozen=True)
class ServerOptions:
    """`ready_s`: how long loading may take. `extra`: more options for tritonserver itself."""

    host: str = "127.0.0.1"
    ports: Ports = Ports()
    ready_s: float = 120.0
    binary: str | Path | None = None
    extra: tuple[str, ...] = field(default=())


class TritonServer(Started):
    """Starts when entered, and is ready then; when left, it and all its processes are gone."""

    def __init__(self, repository: Path, options: ServerOptions | None = None) -> None:
        self.repository = repository
        self.options = options or ServerOptions()
        self._triton: TritonBinary = find_triton(self.options.binary)
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self.ports = Ports()

    def _begin(self) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="soa-triton-"))
        wanted = self.options.ports
        found = free_ports(self.options.host, wanted.grpc, wanted.http, wanted.metrics)
        self.ports = Ports(*found)
        self._start(self._scratch)
        self._wait_until_ready()

    @property
    def url(self) -> str:
        """The device of a remote session: `triton://host:port`."""
        return f"triton://{self.options.host}:{self.ports.grpc}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    def endpoints(self) -> dict[str, str]:
        """Addresses by protocol."""
        host = self.options.host
        return {
            "gRPC": self.url,
            "HTTP": f"http://{host}:{self.ports.http}",
            "metrics": f"http://{host}:{self.ports.metrics}/metrics",
        }

    def wait(self) -> None:
        """Until the server ends by itself, which is a ServerError."""
        if self._process is not None:
            status = self._process.wait()
            raise ServerError(f"tritonserver ended with status {status}: {self._why()}")

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """What the server has said so far."""
        return (self._scratch / "log").read_text(errors="replace") if self._scratch else ""

    def metrics(self, model: str) -> dict[str, float]:
        """Triton's own counters for a model, summed over its versions. Raises ServerError."""
        try:
            text = get(self.endpoints()["metrics"]).decode()
        except OSError as error:
            raise ServerError(f"the server's metrics cannot be read: {error}") from None
        return model_counters(text, model)

    def stop(self) -> None:
        """Ask it to end, and kill what is left of it after 15 s. May be called again."""
        if self._process is not None:
            try:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_S)
            finally:  # also where a second Ctrl-C ends the waiting
                # The whole group: Python stubs, and a server that hangs or is stopped.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            for left in Path("/dev/shm").glob(f"{self._shm_prefix()}*"):
                left.unlink(missing_ok=True)
            self._process = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _shm_prefix(self) -> str:
        return f"soa_triton_{os.getpid()}_{self.ports.grpc}_"

    def _start(self, scratch: Path) -> None:
        with open(scratch / "log", "wb") as log:
            self._process = subprocess.Popen(
                self._command(scratch),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._triton.environment(),
                cwd=scratch,
                start_new_session=True,  # Ctrl-C reaches us alone, and we stop it in order
            )

    def _command(self, scratch: Path) -> list[str]:
        # By number: Triton takes a name, and then answers nobody.
        host, ports = socket.gethostbyname(self.options.host), self.ports
        backends = self._triton.backend_folder(scratch)
        command = [
            str(self._triton.path),
            f"--model-repository={self.repository.resolve()}",
            "--disable-auto-complete-config",
            f"--grpc-address={host}", f"--grpc-port={ports.grpc}",
            f"--http-address={host}", f"--http-port={ports.http}",
            f"--metrics-address={host}", f"--metrics-port={ports.metrics}",
            f"--exit-timeout-secs={int(_STOP_S) - 5}",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix()}",
        ]  # fmt: skip
        if backends is not None:
            command.append(f"--backend-directory={backends}")
        return [*command, *self.options.extra]

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + self.options.ready_s
        while time.monotonic() < until:
            if not self.alive():
                raise ServerError(f"tritonserver ended before it was ready: {self._why()}")
            with contextlib.suppress(OSError):
                get(f"{self.endpoints()['HTTP']}/v2/health/ready")
                get(self.endpoints()["metrics"])  # its door opens last
                return
            time.sleep(_POLL_S)
        raise ServerError(
            f"tritonserver was not ready after {self.options.ready_s:g} s: {self._why()}"
        )

    def _why(self) -> str:
        """The line of its log that says most."""
        log = self.log()
        for pattern in _REASONS:
            if match := re.search(pattern, log):
                return match[0]
        lines = [line for line in log.splitlines() if line.strip() and not re.search(_NO_GPU, line)]
        errors = [line for line in lines if line.startswith(("E", "error", "Error"))]
        return (errors or lines or ["it said nothing"])[-1].strip()
