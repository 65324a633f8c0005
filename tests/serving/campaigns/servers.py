"""Three servers of a site, with the faults that each can have.

`direct` is a Triton that shares memory with its clients, `behind` is one behind a proxy, and `liar`
is a server of the same protocol in this process that can be told to answer wrongly.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serving.errors import ServerError
from serving.local.external_program import free_ports
from serving.local.triton import Ports, ServerOptions, TritonServer
from tests.models.tagged import NAME, Tags
from tests.serving.grpc_server import Server, aborts, changed, nan, without_the_last
from tests.serving.proxy import Proxy

Fault = Callable[[], None]
_FULL = "Exceeds maximum queue size"


class Triton:
    """A real Triton that is always restarted on the same ports."""

    def __init__(self, tags: Tags, folder: Path, chance: random.Random) -> None:
        folder.mkdir()
        self._tags, self._chance = tags, chance
        self._narrow = narrow(tags.repository, folder / "narrow")
        self._tls = certificate(folder)
        self.ports = Ports(*free_ports("127.0.0.1", 0, 0, 0))
        self._server: TritonServer | None = None
        self.start(tags.repository)

    def start(self, repository: Path, *extra: str) -> None:
        deadline = time.monotonic() + 120
        while True:  # another process may use a port for a moment
            try:
                options = ServerOptions(ports=self.ports, extra=extra)
                self._server = TritonServer(repository, options).__enter__()
                return
            except ServerError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    @property
    def server(self) -> TritonServer:
        assert self._server is not None
        return self._server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()

    def faults(self) -> dict[str, Fault]:
        faults = {
            "killed": self.kill,
            "ended in order": lambda: self._other(self._tags.repository, kill=False),
            "hung": self.hang,
            "its Python hung": self.hang_stub,
            "another version": lambda: self._other(self._tags.newer),
            "another bundle under the number": lambda: self._other(self._tags.forged),
            "another form of requests": lambda: self._other(self._tags.in_rows),
            "a queue of one": lambda: self._other(self._narrow),
            "its port taken": self.lose_port,
        }
        if self._tls:
            faults["asks for TLS"] = lambda: self._other(self._tags.repository, *self._tls)
        return faults

    def kill(self) -> None:
        os.killpg(self.server.pid, signal.SIGKILL)
        self.stop()
        self._pause()
        self.start(self._tags.repository)

    def hang(self) -> None:
        self._freeze([-self.server.pid])

    def hang_stub(self) -> None:
        """The server itself still answers that it is ready."""
        self._freeze(children(self.server.pid))

    def lose_port(self) -> None:
        os.killpg(self.server.pid, signal.SIGKILL)
        self.stop()
        with socket.socket() as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stranger.bind(("127.0.0.1", self.ports.grpc))
            stranger.listen()
            self._pause()
        self.start(self._tags.repository)

    def _freeze(self, pids: list[int]) -> None:
        """Stops processes for a while; a negative number is that of a group of processes."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(self._chance.uniform(0.3, 3.0))
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def _other(self, repository: Path, *extra: str, kill: bool = True) -> None:
        """Restarts with another repository or other options, and later as before."""
        self._restart(repository, *extra, kill=kill)
        if repository != self._tags.repository or extra:
            self._restart(self._tags.repository, kill=kill)

    def _restart(self, repository: Path, *extra: str, kill: bool) -> None:
        if kill:
            os.killpg(self.server.pid, signal.SIGKILL)
        self.stop()
        self.start(repository, *extra)
        self._pause()

    def _pause(self) -> None:
        time.sleep(self._chance.uniform(0.2, 1.5))


class Behind:
    """A Triton behind a proxy, with faults of the connection."""

    def __init__(self, triton: Triton, proxy: Proxy, chance: random.Random) -> None:
        self._triton, self._proxy, self._chance = triton, proxy, chance

    def faults(self) -> dict[str, Fault]:
        return {
            "connections cut": self._proxy.cut,
            "connections forgotten": self._proxy.forget,
            "slow": lambda: self._mode("delay"),
            "a hole": lambda: self._mode("hole"),
            "a stranger on the port": lambda: self._mode("junk", cut=True),
            "proxy gone": self._gone,
            "killed behind the proxy": self._triton.kill,
        }

    def _mode(self, mode: Any, cut: bool = False) -> None:
        self._proxy.mode = mode
        if cut:
            self._proxy.cut()
        time.sleep(self._chance.uniform(0.3, 2.5))
        self._proxy.mode = "pass"

    def _gone(self) -> None:
        self._proxy.go()
        time.sleep(self._chance.uniform(0.3, 2.0))
        self._proxy.come_back()


class Liar:
    """A server with every kind of wrong answer that a client can detect."""

    def __init__(self, server: Server, chance: random.Random) -> None:
        self._server, self._chance = server, chance

    def faults(self) -> dict[str, Fault]:
        return {
            "NaN": lambda: self._lie(nan(1)),
            "a wrong shape": lambda: self._lie(_shape),
            "a wrong dtype": lambda: self._lie(changed(1, datatype="INT32")),
            "an array missing": lambda: self._lie(without_the_last),
            "an error": lambda: self._lie(aborts(grpc.StatusCode.INTERNAL, "the kernel failed")),
            "late, and wrong": lambda: self._lie(_late),
            "full": lambda: self._lie(aborts(grpc.StatusCode.UNAVAILABLE, _FULL)),
        }

    def _lie(self, fault: Any) -> None:
        """Changes all or half of the answers for a while."""
        often = self._chance.choice((1.0, 0.5))

        def sometimes(answer: Any, context: Any) -> Any:
            return fault(answer, context) if random.random() < often else answer

        self._server.fault = sometimes
        time.sleep(self._chance.uniform(0.3, 2.0))
        self._server.fault = lambda answer, context: answer


def _shape(answer: Any, context: Any) -> Any:
    """An answer with a row that is not there."""
    answer.outputs[1].shape[0] += 1
    return answer


def _late(answer: Any, context: Any) -> Any:
    """A wrong answer that comes after `attempt_s`, when the client has asked another server."""
    time.sleep(1.5)
    answer.raw_output_contents[0] = b"\x55" * len(answer.raw_output_contents[0])
    return answer


def children(pid: int) -> list[int]:
    """The child processes of a process, from /proc."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == pid:  # the parent, after the state
            pids.append(int(stat.parent.name))
    return pids


def narrow(repository: Path, folder: Path) -> Path:
    """The same model with a queue for one request, which waits there to be merged."""
    shutil.copytree(repository, folder)
    file = folder / NAME / "config.pbtxt"
    config = text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())
    batching = config.dynamic_batching
    batching.max_queue_delay_microseconds = 100_000
    batching.default_queue_policy.max_queue_size = 1
    del batching.preferred_batch_size[:]
    file.write_text(text_format.MessageToString(config))
    return folder


def certificate(folder: Path) -> tuple[str, ...]:
    """Triton's options for TLS; none if openssl is missing."""
    if shutil.which("openssl") is None:
        return ()
    key, pem = folder / "key.pem", folder / "certificate.pem"
    if not pem.exists():
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
             "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
             "-keyout", key, "-out", pem],
            check=True, capture_output=True,
        )  # fmt: skip
    return ("--grpc-use-ssl=1", f"--grpc-server-cert={pem}", f"--grpc-server-key={key}")
