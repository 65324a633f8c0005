"""Run an external program on this host: find it, start it, wait for it, and stop it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from serving.errors import ServerError
from serving.metrics_reader import read_page, sum_metrics

_POLL_S = 0.05


class LocalProgram(ABC):
    """A program that runs during a `with` block.

    It is ready when the block begins. When the block ends, all its processes have ended.

    It runs in a new process group and a new working folder. If it does not start, its processes are
    killed and the folder is removed. `ready_s`: the time limit for the start. `stop_s`: the time
    between the request to end and the kill.
    """

    ready_s = 20.0
    stop_s = 5.0

    def __init__(self, binary: Path, host: str = "127.0.0.1") -> None:
        self.name = binary.name
        self.host = host
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    @abstractmethod
    def _command(self, folder: Path) -> Sequence[str | Path]:
        """Return the command line, once for each start. `folder`: the working folder."""

    @abstractmethod
    def _ready_urls(self) -> Sequence[str]:
        """Return the URLs that all answer once the program is ready."""

    def _environment(self) -> Mapping[str, str] | None:
        """Return the environment of the program; None means that of this process."""
        return None

    def _clean(self) -> None:
        """Remove files that the program leaves outside its folder when it is killed."""
        return

    def __enter__(self) -> Self:
        """Start the program, and wait until it is ready. Raises ServerError, and then leaves no
        process."""
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=f"soa-{self.name}-"))
            command = [str(part) for part in self._command(self._folder)]
            with open(self._folder / "log", "wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment(),
                    cwd=self._folder,
                    start_new_session=True,  # Ctrl-C reaches only this process, which stops it
                )
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The id of the program's process and process group."""
        return self._started_process().pid

    def alive(self) -> bool:
        """Whether the program was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Raise ServerError if the program has ended."""
        if (status := self._started_process().poll()) is not None:
            raise ServerError(f"{self.name} ended with status {status}: {self._reason()}")

    def wait(self) -> None:
        """Wait until the program ends by itself, then raise ServerError."""
        self._started_process().wait()
        self.check()  # raises

    def log(self) -> str:
        """Return the output of the program so far; "" if it is not running."""
        return (self._folder / "log").read_text(errors="replace") if self._folder else ""  # trusted

    def stop(self) -> None:
        """Ask the program to end, and kill it and all its processes after `stop_s`.

        Does nothing if it is not running.
        """
        if self._process is not None:
            try:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(self.stop_s)
            finally:  # also if a second Ctrl-C ends the wait
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._clean()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _read_metrics(self, url: str, **labels: str) -> dict[str, float]:
        """Read the page of metrics at a URL, and return their sums as `sum_metrics` does.

        Raises ServerError if the page cannot be read.
        """
        try:
            return sum_metrics(read_page(url).decode("utf-8", "replace"), **labels)
        except (OSError, ValueError) as error:
            raise ServerError(f"{self.name}: its metrics cannot be read: {error}") from None

    def _started_process(self) -> subprocess.Popen[bytes]:
        """Return the process, which may have ended. Raises ServerError if it was not started."""
        if self._process is None:
            raise ServerError(f"{self.name} is not running")
        return self._process

    def _wait_until_ready(self) -> None:
        """Wait until the program is ready. Raises ServerError if it ends, or takes too long."""
        until = time.monotonic() + self.ready_s
        while time.monotonic() < until:
            self.check()
            if self._is_ready():
                return
            time.sleep(_POLL_S)
        raise ServerError(f"{self.name} was not ready after {self.ready_s:g} s: {self._reason()}")

    def _is_ready(self) -> bool:
        """Whether all URLs of `_ready_urls` answer now."""
        try:
            for url in self._ready_urls():
                read_page(url)
        except OSError:
            return False
        return True

    def _reason(self) -> str:
        """Return the last line of the log, which usually says why the program has failed."""
        lines = [line.strip() for line in self.log().splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def find_program(
    name: str, variable: str, bundled: Path | None, advice: str, named: str | Path | None = None
) -> Path:
    """Find the program `name`, and return its path.

    The path is `named`, else the value of the environment variable `variable`, else `bundled` if
    that exists, else that of the program on PATH. `advice`: how to get the program; in the message,
    the variable's name follows it. Raises ServerError if there is none, or if the named file is not
    executable.
    """
    named = named or os.environ.get(variable)
    if named:
        path = Path(shutil.which(named) or named)
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise ServerError(f"{named} is no {name}: there is no such executable file")
        return path.resolve()
    if bundled is not None and bundled.is_file():
        return bundled
    if on_path := shutil.which(name):
        return Path(on_path).resolve()
    raise ServerError(f"no {name} here: {advice} ${variable}")


def free_ports(host: str, *wanted: int) -> list[int]:
    """Return the wanted ports, with a free port in place of each 0.

    Raises ServerError if a wanted port is in use. Another program may take a port before the caller
    does.
    """
    ports = []
    with contextlib.ExitStack() as sockets:  # all stay open, so no port is found twice
        for port in wanted:
            try:
                bound = sockets.enter_context(socket.socket())
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind((host, port))
            except (OSError, OverflowError) as error:  # OverflowError: no such port number
                raise ServerError(
                    f"port {port} of {host} cannot be used ({getattr(error, 'strerror', error)}): "
                    "name another, or none for a free one",
                    code="port",
                ) from None
            ports.append(int(bound.getsockname()[1]))
    return ports
