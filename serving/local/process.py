"""A program of others on this host: started, waited for, and stopped, each within a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from serving.errors import ServerError
from serving.metrics import get

_STOP_S = 5.0
_POLL_S = 0.05


class Started(ABC):
    """Runs from when it is entered until it is left. What does not start leaves nothing behind."""

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @abstractmethod
    def _begin(self) -> None:
        """Until it is ready."""

    @abstractmethod
    def stop(self) -> None:
        """Whatever there is of it. May be called again."""


class LocalProcess:
    """Runs at once, in a process group of its own; `log` gets what it says."""

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        self.name = Path(command[0]).name
        self._log = log
        with open(log, "wb") as out:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                start_new_session=True,  # Ctrl-C reaches us alone, and we stop it in order
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise ServerError if it has ended."""
        if (status := self._process.poll()) is not None:
            raise ServerError(f"{self.name} ended with status {status}: {self._last_words()}")

    def wait_for(self, url: str, seconds: float) -> None:
        """Until GET of `url` succeeds; raises ServerError."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.check()
            with contextlib.suppress(OSError):
                get(url)
                return
            time.sleep(_POLL_S)
        raise ServerError(f"{self.name} was not ready after {seconds:g} s: {self._last_words()}")

    def stop(self) -> None:
        """Ask it to end, and kill it after 5 s. May be called again."""
        try:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def free_ports(host: str, *wanted: int) -> list[int]:
    """Those wanted, and a free one for each 0; raises ServerError for one that is taken."""
    with contextlib.ExitStack() as held:
        return [_port(held, host, port) for port in wanted]


def _port(held: contextlib.ExitStack, host: str, port: int) -> int:
    try:
        bound = held.enter_context(socket.socket())
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ServerError(
            f"port {port} of {host} cannot be used ({getattr(error, 'strerror', error)}): "
            "name another, or none for a free one"
        ) from None
    return int(bound.getsockname()[1])
