"""`pipeline deploy` for a cluster: the files beside the repository, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from registry.store.registry import Registry
from tests.models.project import PASSED, cli, refusal
from tests.serving.cluster.needs import SCHEMA, installed

IMAGE = ("--image", "registry.example/soa-triton:1")


@pytest.fixture
def promoted(registry: Registry) -> Registry:
    registry.promote(registry.find("jets/1"), "production", PASSED)
    return registry


def test_values_for_the_chart(promoted: Registry, tmp_path: Path) -> None:
    where = ("--out", tmp_path / "a", "--registry", promoted.uri)
    file = tmp_path / "b" / "values.yaml"
    more = ("--servers", "2-6", "--queue-ms", 40, "--models", "pvc:cms/models")
    said = cli("deploy", "jets@production", *where, "--helm", file, *IMAGE, *more).stdout
    assert f"values for the SuperSONIC chart are in {file}" in said
    values = yaml.safe_load(file.read_text())
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator(schema).validate(installed(values))
    assert (values["keda"]["minReplicaCount"], values["keda"]["maxReplicaCount"]) == (2, 6)
    assert values["serverLoadThreshold"] == 40
    assert "--model-repository=/models/models" in values["triton"]["args"]
    assert "helm install jets fastml/supersonic" in file.read_text()
    assert (tmp_path / "a" / "jets" / "config.pbtxt").is_file()

    assert "exists already" in refusal("deploy", "jets", *where, "--helm", file, *IMAGE)
    inside = refusal("deploy", "jets", *where, "--replace", "--helm", file / "x", *IMAGE)
    assert f"cannot write {file / 'x'}: " in inside
    said = cli("deploy", "jets", *where, "--helm", file, *IMAGE, "--replace", "--json").stdout
    assert json.loads(said)["cluster"] == [f"values for the SuperSONIC chart are in {file}"]
    assert yaml.safe_load(file.read_text())["keda"]["maxReplicaCount"] == 10


def test_mistakes_leave_nothing(promoted: Registry, tmp_path: Path) -> None:
    where = ("--out", tmp_path / "a", "--registry", promoted.uri, "--helm", tmp_path / "v.yaml")
    assert "use pvc:CLAIM" in refusal("deploy", "jets", *where, *IMAGE, "--models", "here")
    assert "0 to 3 servers" in refusal("deploy", "jets", *where, *IMAGE, "--servers", "0-3")
    assert cli("deploy", "jets", *where[:4], *IMAGE, code=2).stdout == ""
    for more in ((), (*IMAGE, "--servers", "many")):
        assert cli("deploy", "jets", *where, *more, code=2).stdout == ""
    gone = cli("deploy", "jets", *where[:4], *IMAGE, "--manifests", tmp_path / "k8s", code=2)
    assert "--helm values.yaml" in gone.stderr and not (tmp_path / "k8s").exists()
    assert not (tmp_path / "a").exists() and not (tmp_path / "v.yaml").exists()
