"""The metric that servers are started by: its words, and a real Prometheus that answers them."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import yaml

from serving.cluster.metrics import prometheus_config, queue_query, static_targets
from serving.local.fleet import Fleet
from tests.serving.cluster.conftest import Stall
from tests.serving.cluster.plans import CPU
from tests.serving.cluster.prometheus import Prometheus, check_config, find, running
from tests.serving.cluster.test_envoy import send
from tests.serving.cluster.test_manifests import objects


def local_config(fleet: Fleet, release: str) -> dict[str, Any]:
    """What scrapes the servers and the proxy of this host."""
    servers = [f"127.0.0.1:{server.ports.metrics}" for server in fleet.servers]
    return prometheus_config(
        release, static_targets(*servers), static_targets(fleet.proxy.stats_address)
    )


def test_prometheus_takes_the_configurations(tmp_path: Path) -> None:
    local = prometheus_config("jets", static_targets("127.0.0.1:1"), static_targets("127.0.0.1:2"))
    text = objects(CPU)["ConfigMap", "jets-prometheus"]["data"]["prometheus.yml"]
    for config in (local, yaml.safe_load(text)):
        assert "is valid prometheus config file syntax" in check_config(config, tmp_path)


def test_promtool_takes_the_query(tmp_path: Path) -> None:
    rule = {"record": "queue_ms", "expr": queue_query("Jet_Tagger.v2", "jet-tagger-v2")}
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "queue", "rules": [rule]}]}))
    config = prometheus_config("jets", static_targets(), static_targets())
    said = check_config({**config, "rule_files": [str(rules)]}, tmp_path)
    assert "1 rules found" in said


def test_the_queue_is_seen(fleet: Fleet, stall: Stall, tmp_path: Path) -> None:
    """One number at any time: 0 before there is any, small for one client at a time, and larger
    when many requests stand in the queues."""
    find("prometheus")
    query = queue_query("mixed", "shop")
    config = local_config(fleet, "shop")
    # A second in place of five, so that the test need not wait half a minute.
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    session = stall.connect(fleet.url)
    with running(config, tmp_path) as prometheus:
        assert prometheus.ask(query) == [0.0]
        until_all_are_scraped(prometheus)
        quiet = highest(prometheus, query, lambda: [send(stall, session, 1) for _ in range(20)])
        assert 0 <= quiet < 1000
        loaded = highest(prometheus, query, lambda: send(stall, session, 300))
        assert loaded > quiet
        assert prometheus.ask(queue_query("mixed", "another")) == [0.0]
        assert prometheus.ask('sum(up{release="shop"})') == [3.0]
        assert prometheus.ask('max(envoy_cluster_membership_healthy{release="shop"})') == [2.0]
    session.close()


def until_all_are_scraped(prometheus: Prometheus) -> None:
    until = time.monotonic() + 60
    while prometheus.ask("sum(up)") != [3.0]:
        assert time.monotonic() < until
        time.sleep(0.2)


def highest(prometheus: Prometheus, query: str, work: Any) -> float:
    """The largest answer while the work is done again and again for some scrapes."""
    most = 0.0
    for _ in range(5):
        begun = time.monotonic()
        work()
        time.sleep(max(0.0, 1.0 - (time.monotonic() - begun)))
        (text,) = prometheus.ask_text(query)
        assert re.fullmatch(r"[\d.]+", text), text  # what the chart's Lua filter reads
        most = max(most, float(text))
    return most
