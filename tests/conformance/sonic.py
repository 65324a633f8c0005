"""What the tests of CMSSW's SonicTriton show, with two real Tritons.

Those tests print the answers; here they are compared: the identity's with its input, those of a
small graph network with eager torch's.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pipeline
from pipeline.deployment import deploy, load_on, unload_from
from registry.store.registry import Registry
from serving.errors import RemoteError
from serving.local.external_program import free_ports
from serving.local.triton import EXPLICIT, Ports, ServerOptions, TritonServer
from serving.site.options import Site
from serving.site.site_session import SiteSession
from soa import Block, Layout, RowRange, Signature, column
from tests.models.building import signature_of
from tests.models.project import PASSED
from tests.models.served import make_bundle

COUNTS = (2, 4, 1, 3)
"""TritonIdentityProducer's entries: {2, 2}, {4, 4, 4, 4}, {1} and {3, 3, 3}."""

IDENTITY = signature_of({"x": "value"}, {"y": "value"}, RowRange(0, 64), names=("given", "found"))
FEATURES = tuple(f"f{k}" for k in range(8))
LOGITS = tuple(f"y{k}" for k in range(7))
GRAPH = Signature.build(
    {
        "nodes": Layout([column(name, "float32") for name in FEATURES]),
        "edges": Layout([column("source", "int64"), column("target", "int64")]),
        "out": Layout([column(name, "float32") for name in LOGITS]),
    },
    [Block("nodes", "nodes", FEATURES), Block("edges", "edges", ("source", "target"))],
    [Block("logits", "out", LOGITS)],
    {"nodes": RowRange(1, 10, (10,)), "edges": RowRange(0, 40, (40,))},
    {"nodes": "nodes", "edges": "edges", "out": "nodes"},
)
POLICY = {"deadline_s": 60.0, "attempt_s": 10.0, "health_s": 0.2}


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


class Graph(nn.Module):
    """Sums over the nodes from which an edge comes, then seven classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.node, self.last = nn.Linear(8, 16), nn.Linear(16, 7)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = (edges % nodes.shape[0]).unbind(1)
        hidden = torch.relu(self.node(nodes))
        classes: Tensor = self.last(hidden.index_add(0, target, hidden[source]))
        return classes


@dataclass
class Servers:
    """Two Tritons with the models `identity` and `graph`, each on ports that it keeps."""

    registry: Registry
    repository: Path
    ports: list[Ports] = field(default_factory=list)
    running: dict[int, TritonServer] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def made(cls, folder: Path) -> Iterator[Servers]:
        registry = Registry(f"sqlite:///{folder}/registry.db")
        models = {"identity": (Identity(), IDENTITY), "graph": (Graph(), GRAPH)}
        for name, (model, signature) in models.items():
            bundle = make_bundle(folder / name, name, model, signature)
            version = registry.promote(registry.register(bundle), "production", PASSED)
            deploy(registry, version.ref, folder / "repository")
        ports = [Ports(*free_ports("127.0.0.1", 0, 0, 0)) for _ in range(2)]
        servers = cls(registry, folder / "repository", ports)
        try:
            yield servers
        finally:
            for server in servers.running.values():
                server.stop()

    def url(self, index: int) -> str:
        """The address of a server, which is started if it does not run."""
        if index not in self.running:
            options = ServerOptions(ports=self.ports[index], extra=EXPLICIT)
            self.running[index] = TritonServer(self.repository, options).__enter__()
        return self.running[index].url

    def kill(self, index: int) -> None:
        """Ends a server at once; `url` starts it again on the same ports."""
        server = self.running.pop(index)
        os.killpg(server.pid, signal.SIGKILL)
        server.stop()

    def session(self, name: str, **options: Any) -> Any:
        """A session at the first server."""
        remote = pipeline.RemoteOptions(deadline_s=60.0, **options)
        return pipeline.load(f"{name}/1", device=self.url(0), registry=self.registry, remote=remote)

    def site(self, *indices: int, fall_back: bool) -> SiteSession:
        """A session of `identity` at several servers. `fall_back`: and on the local CPU."""
        servers = [{"name": f"server {k}", "url": self.url(k)} for k in indices]
        local = {"fall_back": fall_back}
        site = Site.model_validate({"servers": servers, "local": local, "policy": POLICY})
        session = pipeline.load("identity/1", site=site, registry=self.registry)
        assert isinstance(session, SiteSession)
        return session


@dataclass(frozen=True)
class SonicCase:
    """`holds`: whether a case goes as CMSSW's test asserts."""

    source: str
    asserts: str
    holds: Callable[[Servers], bool]


def entries(session: Any, count: int) -> tuple[Any, Any]:
    """Collections of `count` values, each of which is `count`, and for the answer."""
    inputs, answers = session.collection("given", count), session.collection("found", count)
    inputs["value"][:] = count
    answers["value"][:] = -1
    return inputs, answers


def same(events: list[tuple[Any, Any]]) -> bool:
    """Whether the answers of all events are their inputs."""
    return all(np.array_equal(answers["value"], inputs["value"]) for inputs, answers in events)


def ragged_identity(servers: Servers) -> bool:
    """Whether 100 events of several sizes come back, with and without shared memory."""
    right = []
    for shared in (False, True):
        session = servers.session("identity", shared_memory=shared)
        events = [entries(session, count) for count in COUNTS * 25]
        session.run_many([session.bind(*event) for event in events])
        right.append(same(events))
        session.close()
    return all(right)


def graphs_right(session: Any, events: int) -> bool:
    """Whether random graphs have the answers of eager torch."""
    model, draw = Graph().eval(), np.random.default_rng(1)
    right = []
    for _ in range(events):
        n, m = int(draw.integers(1, 11)), int(draw.integers(20, 41))
        x = draw.normal(size=(n, 8)).astype(np.float32)
        edges = draw.integers(0, n, (m, 2))
        nodes, links = session.collection("nodes", n), session.collection("edges", m)
        out = session.collection("out", n)
        for k, name in enumerate(FEATURES):
            nodes[name][:] = x[:, k]
        links["source"][:], links["target"][:] = edges.T
        session.run({"nodes": nodes, "edges": links}, out)
        with torch.no_grad():
            wanted = model(torch.from_numpy(x), torch.from_numpy(edges)).numpy()
        logits = np.stack([out[name] for name in LOGITS], 1)
        right.append(np.allclose(logits, wanted, rtol=1e-5, atol=1e-6))
    return all(right)


def graph_producer(servers: Servers) -> bool:
    """Whether 20 graphs are right, with and without shared memory."""
    right = []
    for shared in (False, True):
        session = servers.session("graph", shared_memory=shared)
        right.append(graphs_right(session, 20))
        session.close()
    return all(right)


def same_server(servers: Servers) -> bool:
    """Whether no event of 100 is lost when the server is killed at event 30 and comes back."""
    session = servers.site(0, fall_back=False)
    events = []
    again = threading.Thread(target=servers.url, args=(0,))
    for k in range(100):
        if k == 30:
            servers.kill(0)
            again.start()
        events.append(entries(session, COUNTS[k % 4]))
        session.run(*events[-1])
    again.join()
    report = session.report()
    session.close()
    return same(events) and not report.fell_back and not report.nowhere


def other_server_then_here(servers: Servers) -> bool:
    """Whether no event of 100 is lost when one server is killed at event 30, the other at 60."""
    session = servers.site(0, 1, fall_back=True)
    events = []
    for k in range(100):
        if k in (30, 60):
            servers.kill(k // 30 - 1)
        events.append(entries(session, COUNTS[k % 4]))
        session.run(*events[-1])
    report = session.report()
    session.close()
    first, second = report.places
    answered = (first.answered, second.answered, report.fell_back)
    everywhere = sum(answered) == 100 and all(answered)
    return same(events) and everywhere and bool(first.failed or second.failed)


def dynamic_loading(servers: Servers) -> bool:
    """The graph network goes and comes, while another model is asked all the time."""
    url, registry = servers.url(0), servers.registry
    events: list[tuple[Any, Any]] = []
    errors: list[Exception] = []
    ended = threading.Event()
    with ExitStack() as stack:
        identity, graph = servers.session("identity"), servers.session("graph")
        stack.callback(identity.close)
        stack.callback(graph.close)

        def ask() -> None:
            while not ended.wait(0.01):
                events.append(entries(identity, COUNTS[len(events) % 4]))
                try:
                    identity.run(*events[-1])
                except RemoteError as error:
                    errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            unload_from(registry, "graph/1", url)
            gone = False
            try:
                graphs_right(graph, 1)
            except RemoteError:
                gone = True
            load_on(registry, "graph/1", url)
            right = graphs_right(graph, 5)
        finally:
            ended.set()
            asking.join()
    return gone and right and same(events) and not errors


SONIC = {
    "ragged identity": SonicCase(
        "SonicTriton/test/TritonIdentityProducer.cc", "{2, 2}, {4, 4, 4, 4}, {1}, {3, 3, 3}",
        ragged_identity),
    "graph producer": SonicCase(
        "SonicTriton/test/TritonGraphModules.cc", "1 to 10 nodes, 20 to 40 edges; messages and "
        "shared memory", graph_producer),
    "dynamic loading": SonicCase(
        "SonicTriton/test/DynamicModelLoadingProducer.cc (#51643)", "a model is unloaded and "
        "loaded, and another one loses no request", dynamic_loading),
    "same server": SonicCase(
        "SonicTriton/test/retry_action_same.sh (#51643)", "100 events, the server is killed and "
        "comes back", same_server),
    "other server": SonicCase(
        "SonicTriton/test/retry_action_diff.sh (#51643)", "100 events, one server is killed, then "
        "the other: then the local CPU", other_server_then_here),
}  # fmt: skip
