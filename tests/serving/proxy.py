"""A TCP proxy in front of a server, which can be told to misbehave."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from types import TracebackType
from typing import Literal, Self

Mode = Literal["pass", "delay", "hole", "junk"]
"""How the proxy handles connections.

`delay`: 0.1 s for each piece. `hole`: nothing gets through, and nothing is closed. `junk`: the port
belongs to another program, which answers in another protocol and hangs up.
"""

_PIECE = 1 << 16
_POLL_S = 0.02


class Proxy:
    """Listens on a port of 127.0.0.1 and forwards to another port, while its block runs."""

    def __init__(self, target: int, port: int = 0) -> None:
        self.mode: Mode = "pass"
        self._target = target
        self._listener = _listen(port)
        self.port = int(self._listener.getsockname()[1])
        self._links: list[_Link] = []
        self._gone = self._ended = False
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)

    @property
    def url(self) -> str:
        return f"triton://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Closes every connection, also in the middle of a message."""
        for link in self._current():
            link.close()

    def forget(self) -> None:
        """Silently stops forwarding on existing connections; new ones work."""
        for link in self._current():
            link.forgotten = True

    def go(self) -> None:
        """Stops listening."""
        self._gone = True
        self._listener.close()
        self.cut()

    def come_back(self) -> None:
        """Listens on the same port again."""
        self._listener = _listen(self.port)
        self._gone = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended = True
        self._thread.join()
        self._listener.close()
        self.cut()

    def _current(self) -> list[_Link]:
        self._links = [link for link in self._links if not link.closed]
        return list(self._links)

    def _accept(self) -> None:
        while not self._ended:
            if self._gone:
                time.sleep(_POLL_S)
                continue
            try:
                if not _readable(self._listener):
                    continue
                near, _ = self._listener.accept()
            except (OSError, ValueError):  # closed meanwhile
                continue
            self._handle(near)

    def _handle(self, near: socket.socket) -> None:
        """Forwards a new connection, or hangs up."""
        if self.mode == "junk":
            with contextlib.suppress(OSError):
                near.sendall(b"220 welcome to the wrong door\r\n")
            near.close()
            return
        try:
            far = socket.create_connection(("127.0.0.1", self._target), 1.0)
        except OSError:  # the server does not run
            near.close()
        else:
            self._links.append(_Link(self, near, far))


def _readable(*ends: socket.socket) -> list[socket.socket]:
    """The sockets from which something can be read, or a new connection, within a short time."""
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, selectors.EVENT_READ)
        ready = {key.fileobj for key, _ in selector.select(_POLL_S)}
    return [end for end in ends if end in ready]


class _Link:
    """A connection, forwarded in both directions."""

    def __init__(self, proxy: Proxy, near: socket.socket, far: socket.socket) -> None:
        self._proxy, self._ends = proxy, (near, far)
        self.forgotten = self.closed = False
        for end in self._ends:
            end.settimeout(5.0)
        threading.Thread(target=self._carry, name="proxy-link", daemon=True).start()

    def close(self) -> None:
        self.closed = True

    def _carry(self) -> None:
        near, far = self._ends
        try:
            while not self.closed:
                if self.forgotten or self._proxy.mode == "hole":
                    time.sleep(_POLL_S)
                    continue
                for end in _readable(near, far):
                    piece = end.recv(_PIECE)
                    if not piece:
                        return
                    if self._proxy.mode == "delay":
                        time.sleep(0.1)
                    if self.closed:  # in the middle of a message
                        piece = piece[: len(piece) // 2]
                    (far if end is near else near).sendall(piece)
        except (OSError, ValueError):
            pass  # an end is closed, or hangs: so the other end is closed, too
        finally:
            self.closed = True
            near.close()
            far.close()


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener
