"""The proxy's configuration by a real Envoy, and two real Tritons behind one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import pipeline
from serving.cluster.proxy import Proxy, envoy_config
from serving.errors import ServerError, ServerGoneError, VersionMismatchError
from serving.local.envoy import VARIABLE, EnvoyProxy, find_envoy
from serving.local.fleet import Fleet
from serving.local.triton import Ports, ServerOptions, TritonServer
from serving.remote.session import RemoteSession
from stages.reference.answers import Reference
from tests.models.building import reference_collections
from tests.serving.cluster.conftest import Stall

REQUESTS = 200


def validate(envoy: Path, config: dict[str, Any], folder: Path) -> str:
    """What Envoy says about a configuration; it must take it, and nothing in it may be outdated."""
    file = folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [envoy, "--mode", "validate", "-c", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deprecated" not in done.stderr.lower(), done.stderr
    return done.stdout


@pytest.mark.parametrize("limit", [None, 100])
def test_envoy_takes_the_configuration(envoy: Path, limit: int | None, tmp_path: Path) -> None:
    proxy = Proxy(
        [("jets-triton", 8001), ("127.0.0.1", 8001)], ("0.0.0.0", 8001), ("0.0.0.0", 9902),
        connections_per_s=limit,
    )  # fmt: skip
    assert "OK" in validate(envoy, envoy_config(proxy), tmp_path)


def test_only_harmless_pages_are_shown() -> None:
    stats = envoy_config(Proxy([], ("0.0.0.0", 1), ("0.0.0.0", 2)))["static_resources"]
    (routes,) = [
        filters["typed_config"]["route_config"]["virtual_hosts"][0]["routes"]
        for listener in stats["listeners"]
        if listener["name"] == "stats"
        for filters in listener["filter_chains"][0]["filters"]
    ]
    assert [each["match"] for each in routes] == [{"path": "/ready"}, {"path": "/stats/prometheus"}]


def test_no_envoy_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ServerError, match=rf"pip install .*cluster.*\${VARIABLE}"):
        find_envoy()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ServerError, match="nowhere is no Envoy"):
        find_envoy()


@pytest.mark.parametrize(("count", "ports"), [(0, Ports()), (2, Ports(http=8000))])
def test_fleets_that_cannot_be(count: int, ports: Ports, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="only the proxy's gRPC port can be named"):
        Fleet(tmp_path, count, ServerOptions(ports=ports))


def test_a_proxy_without_servers_says_so(envoy: Path, stall: Stall) -> None:
    """Nothing listens there: the health check knows, and a client is told at once."""
    with EnvoyProxy([("127.0.0.1", 1)]) as proxy:
        assert proxy.healthy() == 0
        with pytest.raises(ServerGoneError):
            pipeline.load("mixed@production", device=proxy.url, registry=stall.registry)
        pid = proxy.pid
        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 10
        with pytest.raises(ServerError, match="envoy ended with status -9"):
            while time.monotonic() < until:
                proxy.check()


def test_both_serve_and_none_is_lost(fleet: Fleet, stall: Stall) -> None:
    session = stall.connect(fleet.url)
    assert session.origin is not None and session.origin.digest == stall.deployed.service.digest
    before = served_by(fleet.servers)
    check(stall, send(stall, session, REQUESTS))
    wait_until(lambda: sum(served_by(fleet.servers)) == sum(before) + REQUESTS)
    each = [now - then for now, then in zip(served_by(fleet.servers), before, strict=True)]
    assert min(each) > REQUESTS / 10, each
    session.close()


def test_a_bundle_that_the_servers_do_not_run(fleet: Fleet, stall: Stall) -> None:
    session = stall.connect(fleet.url)
    model: Any = session._executable
    model._digest = "e" * 64
    with pytest.raises(VersionMismatchError, match="asked for bundle eeeeeeeeeeee"):
        send(stall, session, 1)
    session.close()


def test_a_server_dies_comes_back_and_hangs(fleet: Fleet, stall: Stall) -> None:
    """Each time under load, and each time all answers are there and right."""
    session = stall.connect(fleet.url)
    first, second = fleet.servers
    answers = send(stall, session, REQUESTS, at_half=lambda: os.killpg(first.pid, signal.SIGKILL))
    check(stall, answers)
    wait_until(lambda: fleet.proxy.healthy() == 1)
    before = served_by([second])
    check(stall, send(stall, session, 20))
    wait_until(lambda: served_by([second]) == [before[0] + 20])  # counted after the answer

    same = replace(second.options, ports=Ports(first.ports.grpc))
    first.stop()
    with TritonServer(stall.repository, same) as new:
        wait_until(lambda: fleet.proxy.healthy() == 2)
        (idle,) = served_by([new])

        def serves_again() -> bool:
            check(stall, send(stall, session, 20))
            return served_by([new])[0] > idle

        wait_until(serves_again)

        answers = send(stall, session, REQUESTS, at_half=lambda: os.kill(new.pid, signal.SIGSTOP))
        check(stall, answers)
        wait_until(lambda: fleet.proxy.healthy() == 1)
        os.kill(new.pid, signal.SIGCONT)
        wait_until(lambda: fleet.proxy.healthy() == 2)
    session.close()


def send(stall: Stall, session: RemoteSession, count: int, at_half: Any = None) -> list[Any]:
    """Requests in flight together, answered; `at_half` is called when half of them are sent."""
    inputs = Reference.load(stall.deployed.bundle.file("reference.safetensors")).inputs
    events = []
    sent: list[Future[Any]] = []
    for i in range(count):
        rows = i % 7 + 1
        case = dict.fromkeys(session.signature.dims, rows)
        events.append(reference_collections(session.signature, inputs, case))
        sent.append(session.run_async(*events[-1]))
        if i == count // 2 and at_half is not None:
            at_half()
    for future in sent:
        future.result()
    return events


def check(stall: Stall, events: list[Any]) -> None:
    """Every answer is what a session on this host gives."""
    local = pipeline.load("mixed@production", registry=stall.registry)
    inputs = Reference.load(stall.deployed.bundle.file("reference.safetensors")).inputs
    mine: dict[int, Any] = {}
    for _, written in events:
        n = written["loose"].n
        if n not in mine:
            given, mine[n] = reference_collections(local.signature, inputs, {"n": n})
            local.run(given, mine[n])
        for bound in local.signature.outputs:
            where = bound.block.collection
            for column in bound.block.columns:
                for k in range(written[where].layout[column].components):
                    torch.testing.assert_close(
                        written[where].component(column, k), mine[n][where].component(column, k)
                    )
    local.close()


def wait_until(true: Any) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.1)


def served_by(servers: Any) -> list[float]:
    return [each.metrics("mixed")["nv_inference_request_success"] for each in servers]
