"""What a deployment needs of a version, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serving.cluster.needs import ClusterOptions, Storage, needs_of, object_name, prometheus_at
from serving.errors import ServingError
from tests.serving.conftest import Shop

IMAGE = "registry.example/soa-triton:1"


def test_what_the_version_says(shop: Shop) -> None:
    done = shop.deployed["jets"]
    made = needs_of(done.service, done.bundle, ClusterOptions(IMAGE))
    assert (made.name, made.model, made.version) == ("jets", "jets", "jets/1")
    assert (made.vendor, made.gpus, made.cpus, made.shm_mib) == ("cpu", 0, 2, 64)
    assert made.resources == {"cpu": 2, "memory": f"{made.memory_gib}Gi"}
    assert made.node_selector == {"kubernetes.io/arch": "amd64"}
    record = done.bundle.manifest.targets[done.service.target]
    timed = [
        stats.median_us
        for engine in record.engines()
        for rows, stats in record.candidates[engine].benchmark.items()
        if rows == "1000"
    ]
    assert made.queue_ms == max(5, -(-4 * min(timed) // 1000))
    four = needs_of(replace(done.service, instances=4), done.bundle, ClusterOptions(IMAGE))
    assert four.cpus == made.cpus + 3 and four.memory_gib >= made.memory_gib + 3
    said = needs_of(done.service, done.bundle, ClusterOptions(IMAGE, queue_ms=77, memory_gib=33))
    assert (said.queue_ms, said.memory_gib) == (77, 33)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("jets", "jets"),
        ("Jet_Tagger.v2", "jet-tagger-v2"),
        ("2jets", "m-2jets"),
        ("x" * 200, "x" * 40),
        ("a" * 39 + "._b", "a" * 39),
        ("__", "m"),
    ],
)
def test_names_that_kubernetes_takes(model: str, name: str) -> None:
    assert object_name(model) == name


@pytest.mark.parametrize(
    ("text", "storage"),
    [
        ("pvc:models", Storage("pvc", "models", "/models", "/models")),
        ("pvc:data/cms/run3/", Storage("pvc", "data", "/models", "/models/cms/run3")),
        ("nfs:files.x:/a/b", Storage("nfs", "files.x", "/models", "/models", exported="/a/b")),
        ("/cvmfs/cms.cern.ch/m", Storage("cvmfs", "cvmfs", "/cvmfs", "/cvmfs/cms.cern.ch/m")),
    ],
)
def test_text_names_a_storage(text: str, storage: Storage) -> None:
    assert Storage.parse(text) == storage


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"image": "a b"}, "not the name of a container image"),
        ({"min_servers": 0}, "0 to 10 servers: the first number must be at least 1"),
        ({"min_servers": 4, "max_servers": 3}, "4 to 3 servers"),
        ({"queue_ms": 0}, "queue limit 0: at least 1"),
        ({"memory_gib": -1}, "memory -1"),
        ({"connections_per_s": 0}, "connections a second 0"),
        ({"models": "models"}, "use pvc:CLAIM, pvc:CLAIM/FOLDER"),
        ({"models": "pvc:Models"}, "use pvc:CLAIM"),
        ({"models": "pvc:models/../etc"}, "not a plain absolute folder"),
        ({"models": "/cvmfs/a b"}, "not a plain absolute folder"),
        ({"models": "/cvmfs/a;reboot"}, "not a plain absolute folder"),
        ({"prometheus": "metrics:9090"}, "write http://HOST:PORT"),
        ({"prometheus": "http://metrics:nine"}, "write http://HOST:PORT"),
        ({"prometheus": "http://metrics/path"}, "write http://HOST:PORT"),
    ],
)
def test_options_that_no_cluster_can_take(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ServingError, match=said):
        ClusterOptions(**{"image": IMAGE, **given})


def test_ports_of_prometheus() -> None:
    assert str(prometheus_at("http://a")) == "http://a:9090"
    assert str(prometheus_at("https://a/")) == "https://a:443"
    assert prometheus_at(None) is None
