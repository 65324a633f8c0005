"""Two real Tritons behind a real Envoy, and a real Prometheus that reads their queues."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import pipeline
from serving.client.options import RemoteOptions
from serving.cluster.deployment_files import queue_query
from serving.errors import ServerError, ServerGoneError, VersionMismatchError
from serving.local.external_program import LocalProgram, free_ports
from serving.local.fleet import ENVOY_VARIABLE, EnvoyProxy, Fleet, find_envoy
from serving.local.triton import Ports, ServerOptions, TritonServer
from serving.metrics_reader import read_page
from serving.remote.remote_session import RemoteSession
from tests.serving.cluster.conftest import find_prometheus
from tests.serving.conftest import Shop, until

REQUESTS = 200
OPTIONS = RemoteOptions(retries=8, deadline_s=60, in_flight=16)


def test_without_an_envoy_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(ENVOY_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ServerError, match=rf"pip install .*cluster.*\${ENVOY_VARIABLE}"):
        find_envoy()


def test_a_variable_that_names_no_envoy_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ENVOY_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ServerError, match="nowhere is no envoy"):
        find_envoy()


@pytest.mark.parametrize(
    ("count", "ports"), [(0, Ports()), (2, Ports(http=8000))], ids=["no server", "another port"]
)
def test_a_fleet_that_cannot_be_started_is_refused(
    count: int, ports: Ports, tmp_path: Path
) -> None:
    with pytest.raises(ServerError, match="only the proxy's gRPC port can be named"):
        Fleet(tmp_path, count, ServerOptions(ports=ports))


def test_a_proxy_without_servers_refuses_at_once(envoy: Path, stall: Shop) -> None:
    with EnvoyProxy([("127.0.0.1", 1)]) as proxy:  # nobody listens there
        assert proxy.count_healthy() == 0
        with pytest.raises(ServerGoneError):
            pipeline.load("mixed@production", device=proxy.url, registry=stall.registry)


def test_a_proxy_that_was_killed_is_an_error_of_its_wait(envoy: Path) -> None:
    with EnvoyProxy([("127.0.0.1", 1)]) as proxy:
        os.kill(proxy.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="envoy ended with status -9"):
            proxy.wait()


def test_both_servers_answer_and_no_request_is_lost(fleet: Fleet, stall: Shop) -> None:
    session = stall.connect(fleet.url, "mixed", OPTIONS)
    assert session.origin is not None
    assert session.origin.digest == stall.deployed["mixed"].service.digest
    before = served_by(fleet.servers)
    check(stall, send(stall, session, REQUESTS))
    until(lambda: sum(served_by(fleet.servers)) == sum(before) + REQUESTS)
    shares = [now - then for now, then in zip(served_by(fleet.servers), before, strict=True)]
    assert min(shares) > REQUESTS / 10, shares
    session.close()


def test_a_request_for_another_bundle_is_refused_through_the_proxy(
    fleet: Fleet, stall: Shop
) -> None:
    session = stall.connect(fleet.url, "mixed", OPTIONS)
    model: Any = session.executable
    bundle = replace(model.opened.bundle, digest="e" * 64)
    model.opened = replace(model.opened, bundle=bundle)
    with pytest.raises(VersionMismatchError, match="asked for bundle eeeeeeeeeeee"):
        send(stall, session, 1)
    session.close()


def test_prometheus_sees_how_long_requests_wait(fleet: Fleet, stall: Shop) -> None:
    """The query always gives one number.

    It is 0 before any request, small with one client at a time, and larger when many requests wait
    in the queues.
    """
    binary = find_prometheus("prometheus")
    query = queue_query("mixed", "shop")
    servers = [f"127.0.0.1:{server.ports.metrics}" for server in fleet.servers]
    release = {"relabel_configs": [{"target_label": "release", "replacement": "shop"}]}
    proxy = {"metrics_path": "/stats/prometheus", "job_name": "envoy"}
    config = {
        "global": {"scrape_interval": "1s"},  # not 5 s: the test need not wait half a minute
        "scrape_configs": [
            {"job_name": "triton", "static_configs": [{"targets": servers}], **release},
            {**proxy, "static_configs": [{"targets": [fleet.proxy.stats_address]}], **release},
        ],
    }
    session = stall.connect(fleet.url, "mixed", OPTIONS)
    with Prometheus(binary, config) as prometheus:
        assert prometheus.ask(query) == [0.0]
        until(lambda: prometheus.ask("sum(up)") == [3.0])
        quiet = highest(prometheus, query, lambda: [send(stall, session, 1) for _ in range(20)])
        assert 0 <= quiet < 1000
        loaded = highest(prometheus, query, lambda: send(stall, session, 300))
        assert loaded > quiet
        assert prometheus.ask(queue_query("mixed", "another")) == [0.0]
        assert prometheus.ask('sum(up{release="shop"})') == [3.0]
        assert prometheus.ask('max(envoy_cluster_membership_healthy{release="shop"})') == [2.0]
    session.close()


def test_no_request_is_lost_when_a_server_dies_comes_back_and_hangs(
    fleet: Fleet, stall: Shop
) -> None:
    """Each happens under load, and each time all answers are there and right."""
    session = stall.connect(fleet.url, "mixed", OPTIONS)
    first, second = fleet.servers
    answers = send(stall, session, REQUESTS, at_half=lambda: os.killpg(first.pid, signal.SIGKILL))
    check(stall, answers)
    until(lambda: fleet.proxy.count_healthy() == 1)
    before = served_by([second])
    check(stall, send(stall, session, 20))
    until(lambda: served_by([second]) == [before[0] + 20])  # counted after the answer

    same = replace(second.options, ports=Ports(first.ports.grpc))
    first.stop()
    with TritonServer(stall.repository, same) as new:
        until(lambda: fleet.proxy.count_healthy() == 2)
        (idle,) = served_by([new])

        def serves_again() -> bool:
            check(stall, send(stall, session, 20))
            return served_by([new])[0] > idle

        until(serves_again)
        answers = send(stall, session, REQUESTS, at_half=lambda: os.kill(new.pid, signal.SIGSTOP))
        check(stall, answers)
        until(lambda: fleet.proxy.count_healthy() == 1)
        os.kill(new.pid, signal.SIGCONT)
        until(lambda: fleet.proxy.count_healthy() == 2)
    session.close()


def send(
    stall: Shop, session: RemoteSession, count: int, at_half: Callable[[], object] | None = None
) -> list[Any]:
    """Sends requests together and waits for the answers; calls `at_half` when half are sent."""
    events = []
    futures: list[Future[Any]] = []
    for i in range(count):
        events.append(stall.event("mixed", session, i % 7 + 1))
        futures.append(session.run_async(*events[-1]))
        if i == count // 2 and at_half is not None:
            at_half()
    for future in futures:
        future.result()
    return events


def check(stall: Shop, events: list[Any]) -> None:
    """Requires for each event the answer of a session on this host."""
    local = stall.local("mixed")
    expected_of: dict[int, Any] = {}  # by the number of rows
    for _, outputs in events:
        n = outputs["loose"].n
        if n not in expected_of:
            inputs, expected_of[n] = stall.event("mixed", local, n)
            local.run(inputs, expected_of[n])
        for bound in local.signature.outputs:
            answers = outputs[bound.block.collection]
            expected = expected_of[n][bound.block.collection]
            for column, component in bound.plan.components:
                torch.testing.assert_close(
                    answers.span(column, component).tensor(),
                    expected.span(column, component).tensor(),
                )
    local.close()


def served_by(servers: Sequence[TritonServer]) -> list[float]:
    """How many requests each server has answered."""
    return [server.metrics("mixed")["nv_inference_request_success"] for server in servers]


class Prometheus(LocalProgram):
    """A Prometheus on this host, while its block runs."""

    ready_s = 60.0

    def __init__(self, binary: Path, config: dict[str, Any]) -> None:
        super().__init__(binary)
        self._binary, self._config, self._address = binary, config, ""

    def _command(self, folder: Path) -> list[str | Path]:
        (port,) = free_ports(self.host, 0)
        self._address = f"{self.host}:{port}"
        (folder / "prometheus.yml").write_text(yaml.safe_dump(self._config))
        return [
            self._binary, f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data", f"--web.listen-address={self._address}",
        ]  # fmt: skip

    def _ready_urls(self) -> list[str]:
        return [f"http://{self._address}/-/ready"]

    def ask(self, query: str) -> list[float]:
        """The values of an instant query, one per series."""
        return [float(text) for text in self.ask_text(query)]

    def ask_text(self, query: str) -> list[str]:
        """The values as Prometheus writes them."""
        encoded = urllib.parse.urlencode({"query": query})
        answer = json.loads(read_page(f"http://{self._address}/api/v1/query?{encoded}"))
        assert answer["status"] == "success", answer
        return [series["value"][1] for series in answer["data"]["result"]]


def highest(prometheus: Prometheus, query: str, work: Callable[[], object]) -> float:
    """The largest answer while `work` is repeated during several scrapes."""
    most = 0.0
    for _ in range(5):
        begun = time.monotonic()
        work()
        time.sleep(max(0.0, 1.0 - (time.monotonic() - begun)))
        (text,) = prometheus.ask_text(query)
        assert re.fullmatch(r"[\d.]+", text), text  # the chart's Lua filter can read it
        most = max(most, float(text))
    return most
