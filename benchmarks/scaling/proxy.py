"""A real Envoy before a server, for as long as it takes to see what a request costs it."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

_READY_S = 20.0
_STOP_S = 5.0


def find_envoy(given: str | None) -> Path | None:
    """The binary that is named, or the one on PATH."""
    found = given or shutil.which("envoy")
    return Path(found) if found else None


class Envoy:
    """One worker thread that passes gRPC on to a server on this host."""

    def __init__(self, binary: Path, url: str, folder: Path) -> None:
        self._port = _free_port()
        config = folder / "envoy.json"
        config.write_text(json.dumps(_config(self._port, urlsplit(url).port or 0)))
        log = folder / "envoy.log"
        self._command = [
            str(binary), "-c", str(config), "--concurrency", "1", "--log-path", str(log),
            "--disable-hot-restart",
        ]  # fmt: skip
        self.url = f"triton://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + _READY_S
        while not _listens(self._port):
            if self._process.poll() is not None or time.monotonic() > until:
                self._stop()
                raise OSError(f"{self._command[0]} did not start")
            time.sleep(0.05)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _config(port: int, server: int) -> dict[str, Any]:
    """Envoy's bootstrap: HTTP/2 on both sides, least request, no time limit of a route."""
    types = "type.googleapis.com/envoy.extensions"
    router = {"@type": f"{types}.filters.http.router.v3.Router"}
    manager = {
        "@type": f"{types}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "grpc",
        "codec_type": "HTTP2",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {"match": {"prefix": "/"}, "route": {"cluster": "triton", "timeout": "0s"}}
                    ],
                }
            ]
        },
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
    }
    chain = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    http2 = {
        "@type": f"{types}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    cluster = {
        "name": "triton",
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2
        },
        "load_assignment": {
            "cluster_name": "triton",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(server)}}]}],
        },
    }
    listener = {
        "name": "grpc",
        "address": _address(port),
        "filter_chains": [{"filters": [chain]}],
    }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.5).close()
    except OSError:
        return False
    return True
