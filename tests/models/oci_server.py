"""Debian's `docker-registry`, a real server of OCI artifacts, and what may stand before it."""

from __future__ import annotations

import base64
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from tests.models.authorities import certify
from tests.models.mlflow_server import free_port

PROGRAM = shutil.which("docker-registry")
USER, PASSWORD = "ada", "right"
_HTPASSWD = "ada:$2b$04$abcdefghijklmnopqrstuuFmEfrkTQnczNzw475xE2VhDrK1uwJiC\n"  # by crypt(3)
START_S = 60.0
_IN_MEMORY = Path("/dev/shm")


class OciServer:
    """A server on loopback that answers as soon as the object is made. `more`: settings added to
    its config, by section."""

    def __init__(self, folder: Path, *, password: bool = False, **more: Any) -> None:
        folder.mkdir(parents=True)
        self.folder, self.host = folder, f"127.0.0.1:{free_port()}"
        # The server waits for the disk after each file, which takes most of a test.
        self._store = TemporaryDirectory(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else folder)
        config: dict[str, Any] = {
            "version": "0.1",
            "storage": {"filesystem": {"rootdirectory": self._store.name}},
            "http": {"addr": self.host, **more.pop("http", {})},
            **more,
        }
        if password:
            (folder / "htpasswd").write_text(_HTPASSWD)
            config["auth"] = {"htpasswd": {"realm": "a realm", "path": str(folder / "htpasswd")}}
        (folder / "config.yml").write_text(json.dumps(config))  # JSON is YAML
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts the server, again if it runs, and returns once it accepts connections."""
        self.kill()  # a killed one may still be dying, and its socket still accept
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(PROGRAM), "serve", str(self.folder / "config.yml")],
                env=os.environ | {"OTEL_TRACES_EXPORTER": "none"},
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(OSError), socket.create_connection(self._address, timeout=5):
                return
            time.sleep(0.02)
        self.kill()
        raise RuntimeError(f"docker-registry does not start:\n{self.log()[-2000:]}")

    @property
    def _address(self) -> tuple[str, int]:
        host, port = self.host.split(":")
        return host, int(port)

    def kill(self) -> None:
        """Sends SIGKILL, if the server was started."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Kills the server and removes what it stored."""
        self.kill()
        self._store.cleanup()

    def log(self) -> str:
        """What the server has logged since it was made."""
        return (self.folder / "log").read_text()

    def asked(self, method: str) -> list[str]:
        """The paths of all requests so far with this method."""
        return re.findall(rf'"{method} (\S+) HTTP/1\.1"', self.log())

    def blob(self, digest: str) -> Path:
        """The file in which the server keeps a blob. `digest`: in hex."""
        blobs = Path(self._store.name) / "docker/registry/v2/blobs/sha256"
        return blobs / digest[:2] / digest / "data"


def store_password(home: Path, host: str, password: str = PASSWORD) -> None:
    """What `docker login` does."""
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    (home / ".docker").mkdir(parents=True, exist_ok=True)
    (home / ".docker/config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))


@contextmanager
def relayed(server: OciServer, most: int) -> Iterator[str]:
    """The host and port of a relay, which kills the server after `most` bytes, of both ways."""
    left, lock = [most], threading.Lock()
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, into: socket.socket) -> None:
        with suppress(OSError), closing(source), closing(into):
            while piece := source.recv(4096):
                with lock:
                    was_alive = left[0] >= 0
                    left[0] -= len(piece)
                    if was_alive and left[0] < 0:  # once: the test starts it again
                        server.kill()
                if left[0] < 0:
                    for connection in (listener, source, into):
                        connection.shutdown(socket.SHUT_RDWR)
                into.sendall(piece)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client = listener.accept()[0]
                try:
                    upstream = socket.create_connection(server._address)
                except OSError:
                    client.close()
                    raise
                for pair in ((client, upstream), (upstream, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with closing(listener):
        yield f"127.0.0.1:{listener.getsockname()[1]}"


Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def answering(
    answer: Callable[[http.server.BaseHTTPRequestHandler], Answer],
) -> Iterator[str]:
    """The host and port of a server that gives the answers of a function: the status, the headers
    and the body. It then closes the connection."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer(self)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_POST = do_PUT = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Tokens:
    """Gives the tokens that a docker-registry with the setting `auth` accepts, to the user above.

    `asked`: the scopes for which it gave some.
    """

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        self._root = certify(folder, "root", authority=True)
        self._leaf = certify(folder, "leaf", self._root)

    def settings(self, host: str) -> dict[str, Any]:
        """The setting `auth` of the server, if the tokens come from `host`."""
        more = {"service": "tests", "issuer": "tests", "rootcertbundle": str(self._root.pem)}
        return {"token": {"realm": f"http://{host}/token", **more}}

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> Answer:
        """A token for the scope that is asked for, signed with ES256; 401 to anybody else."""
        expected = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if request.headers.get("Authorization") != f"Basic {expected}":
            return 401, {}, b""
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(request.path).query)
        self.asked += query["scope"]
        kind, name, actions = query["scope"][0].split(":")
        now = int(time.time())
        claims = {
            **{"iss": "tests", "sub": USER, "aud": "tests", "jti": str(len(self.asked))},
            **{"iat": now, "nbf": now - 10, "exp": now + 60},
            "access": [{"type": kind, "name": name, "actions": actions.split(",")}],
        }
        chain = [self._leaf.certificate.public_bytes(serialization.Encoding.DER)]
        x5c = [base64.b64encode(certificate).decode() for certificate in chain]
        head = {"alg": "ES256", "typ": "JWT", "x5c": x5c}
        signed = b".".join(_text64(json.dumps(part).encode()) for part in (head, claims))
        r, s = decode_dss_signature(self._leaf.key.sign(signed, ec.ECDSA(hashes.SHA256())))
        token = signed + b"." + _text64(r.to_bytes(32, "big") + s.to_bytes(32, "big"))
        return 200, {}, json.dumps({"token": token.decode()}).encode()


def _text64(content: bytes) -> bytes:
    """The form of base64 in tokens: for URLs, without padding."""
    return base64.urlsafe_b64encode(content).rstrip(b"=")
