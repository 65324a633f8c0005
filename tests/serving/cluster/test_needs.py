"""What a deployment needs of a version, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from serving.cluster.needs import (
    ClusterOptions,
    Needs,
    Storage,
    needs_of,
    object_name,
    prometheus_with_port,
)
from serving.errors import ServingError
from tests.serving.conftest import Shop

IMAGE = "registry.example/soa-triton:1"
OPTIONS = ClusterOptions(IMAGE)


def needs(shop: Shop, options: ClusterOptions = OPTIONS, **service: Any) -> Needs:
    """The needs of jets/1; `service` changes how it is deployed."""
    deployed = shop.deployed["jets"]
    return needs_of(replace(deployed.service, **service), deployed.bundle, options)


def test_a_version_for_cpus_needs_a_cpu_and_memory(shop: Shop) -> None:
    jets = needs(shop)
    assert (jets.vendor, jets.gpus, jets.cpus, jets.shm_mib) == ("cpu", 0, 2, 64)
    assert jets.resources == {"cpu": 2, "memory": f"{jets.memory_gib}Gi"}
    assert jets.node_selector == {"kubernetes.io/arch": "amd64"}


def test_needs_name_the_model_and_its_version(shop: Shop) -> None:
    jets = needs(shop)
    assert (jets.name, jets.model, jets.version) == ("jets", "jets", "jets/1")


def test_a_request_may_wait_for_four_runs_of_the_fastest_engine(shop: Shop) -> None:
    """But 5 ms at least; in whole milliseconds."""
    deployed = shop.deployed["jets"]
    record = deployed.bundle.manifest.targets[deployed.service.target]
    benchmarks = [record.candidates[name].benchmark for name in record.engines()]
    medians_us = [times["1000"].median_us for times in benchmarks if "1000" in times]
    assert needs(shop).queue_ms == max(5, math.ceil(4 * min(medians_us) / 1000))


def test_each_instance_needs_a_cpu_and_memory(shop: Shop) -> None:
    one, four = needs(shop), needs(shop, instances=4)
    assert four.cpus == one.cpus + 3
    assert four.memory_gib >= one.memory_gib + 3


def test_options_replace_what_the_version_says(shop: Shop) -> None:
    jets = needs(shop, ClusterOptions(IMAGE, queue_ms=77, memory_gib=33))
    assert jets.queue_ms == 77
    assert jets.memory_gib == 33


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
def test_a_model_gets_a_name_that_kubernetes_takes(model: str, name: str) -> None:
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
    ("options", "message"),
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
def test_options_that_no_cluster_can_take_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ServingError, match=message):
        ClusterOptions(**{"image": IMAGE, **options})


@pytest.mark.parametrize(
    ("url", "address"), [("http://a", "http://a:9090"), ("https://a/", "https://a:443")]
)
def test_prometheus_has_a_default_port(url: str, address: str) -> None:
    assert str(prometheus_with_port(url)) == address


def test_without_a_url_there_is_no_prometheus() -> None:
    assert prometheus_with_port(None) is None
