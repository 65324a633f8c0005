"""Several Tritons of one repository on this host, behind one Envoy: a cluster in small."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from serving.cluster import SERVER_OPTION
from serving.errors import ServerError
from serving.local.envoy import EnvoyProxy, find_envoy
from serving.local.process import Started
from serving.local.triton import Ports, ServerOptions, TritonServer

_LOOK_S = 0.5


class Fleet(Started):
    """Starts when entered, and is ready then; when left, all processes are gone.

    `options.ports.grpc` is the proxy's; the servers' are free ones.
    """

    def __init__(self, repository: Path, count: int, options: ServerOptions | None = None) -> None:
        options = options or ServerOptions()
        if count < 1 or options.ports.http or options.ports.metrics:
            raise ServerError(
                f"{count} servers: at least 1 is needed, and only the proxy's gRPC port can be "
                "named, since each server has ports of its own"
            )
        find_envoy()  # before any work
        own = replace(options, ports=Ports(), extra=(*options.extra, SERVER_OPTION))
        self.options = options
        self.servers = tuple(TritonServer(repository, own) for _ in range(count))
        self._proxy: EnvoyProxy | None = None

    def _begin(self) -> None:
        for server in self.servers:
            server.__enter__()
        host = self.options.host
        addresses = [(host, server.ports.grpc) for server in self.servers]
        self._proxy = EnvoyProxy(addresses, host=host, grpc_port=self.options.ports.grpc)
        self._proxy.__enter__()

    @property
    def proxy(self) -> EnvoyProxy:
        if self._proxy is None:
            raise ServerError("the servers are not running")
        return self._proxy

    @property
    def url(self) -> str:
        """The device of a remote session: the proxy's address."""
        return self.proxy.url

    def endpoints(self) -> dict[str, str]:
        """Addresses by protocol: gRPC through the proxy, and the metrics of each."""
        found = {"gRPC": self.url}
        for i, server in enumerate(self.servers):
            found[f"metrics {i}"] = server.endpoints()["metrics"]
        return {**found, "Envoy": f"http://{self.proxy.stats_address}/stats/prometheus"}

    def metrics(self, model: str) -> dict[str, float]:
        """Triton's own counters for a model, summed over the servers that live."""
        total: Counter[str] = Counter()
        for server in self.servers:
            if server.alive():
                total.update(server.metrics(model))
        return dict(total)

    def wait(self) -> None:
        """Until the proxy or the last server ends by itself, which is a ServerError."""
        while any(server.alive() for server in self.servers):
            self.proxy.check()
            time.sleep(_LOOK_S)
        self.servers[-1].wait()

    def stop(self) -> None:
        """The proxy first, so that it does not send requests to servers that end."""
        if self._proxy is not None:
            self._proxy.stop()
        for server in self.servers:
            server.stop()


def serve_by(count: int, repository: Path, options: ServerOptions) -> TritonServer | Fleet:
    """One server, or several behind a proxy; not started yet."""
    if count == 1:
        return TritonServer(repository, options)
    return Fleet(repository, count, options)
