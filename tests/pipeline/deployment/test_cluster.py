"""`pipeline deploy` for a cluster: the files beside the repository, and refusals."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    """jets/1 in production."""
    registry.promote(registry.find("jets/1"), "production", PASSED)
    return registry


@dataclass(frozen=True)
class Chart:
    """A deployment: the values for the chart, and the options of the command that wrote them."""

    file: Path
    options: tuple[object, ...]
    output: str


@pytest.fixture
def chart(promoted: Registry, tmp_path: Path) -> Chart:
    """jets@production for a cluster of two to six servers."""
    file = tmp_path / "b" / "values.yaml"
    options = ("--out", tmp_path / "a", "--registry", promoted.uri, "--helm", file, *IMAGE)
    settings = ("--servers", "2-6", "--queue-ms", 40, "--models", "pvc:cms/models")
    return Chart(file, options, cli("deploy", "jets@production", *options, *settings).stdout)


def test_values_are_of_the_charts_schema(chart: Chart) -> None:
    assert f"values for the SuperSONIC chart are in {chart.file}" in chart.output
    schema = json.loads(SCHEMA.read_text())
    values = yaml.safe_load(chart.file.read_text())
    jsonschema.Draft202012Validator(schema).validate(installed(values))


def test_values_have_the_options_of_the_command(chart: Chart) -> None:
    values = yaml.safe_load(chart.file.read_text())
    assert (values["keda"]["minReplicaCount"], values["keda"]["maxReplicaCount"]) == (2, 6)
    assert values["serverLoadThreshold"] == 40
    assert "--model-repository=/models/models" in values["triton"]["args"]


def test_the_repository_is_written_and_the_values_say_how_to_install(
    chart: Chart, tmp_path: Path
) -> None:
    assert "helm install jets fastml/supersonic" in chart.file.read_text()
    assert (tmp_path / "a" / "jets" / "config.pbtxt").is_file()


def test_values_are_replaced_if_asked(chart: Chart) -> None:
    assert "exists already" in refusal("deploy", "jets", *chart.options)
    text = cli("deploy", "jets", *chart.options, "--replace", "--json").stdout
    assert json.loads(text)["cluster"] == [f"values for the SuperSONIC chart are in {chart.file}"]
    assert yaml.safe_load(chart.file.read_text())["keda"]["maxReplicaCount"] == 10


def test_values_that_cannot_be_written_are_named(chart: Chart) -> None:
    inside = chart.file / "x"
    line = refusal("deploy", "jets", *chart.options, "--replace", "--helm", inside)
    assert f"cannot write {inside}: " in line


@pytest.mark.parametrize(
    ("options", "says"),
    [(("--models", "here"), "use pvc:CLAIM"), (("--servers", "0-3"), "0 to 3 servers")],
)
def test_a_refused_deployment_leaves_nothing(
    promoted: Registry, tmp_path: Path, options: tuple[str, str], says: str
) -> None:
    where = ("--out", tmp_path / "a", "--registry", promoted.uri, "--helm", tmp_path / "v.yaml")
    assert says in refusal("deploy", "jets", *where, *IMAGE, *options)
    assert list(tmp_path.glob("[av]*")) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (IMAGE, "--helm"),
        (("--helm", "v.yaml"), "--image"),
        (("--helm", "v.yaml", *IMAGE, "--servers", "many"), "many"),
        ((*IMAGE, "--manifests", "k8s"), "--helm values.yaml"),
    ],
)
def test_options_of_a_cluster_that_do_not_fit(
    promoted: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...], says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    where = ("--out", "a", "--registry", promoted.uri)
    assert says in cli("deploy", "jets", *where, *options, code=2).stderr
    assert not any(Path(name).exists() for name in ("a", "v.yaml", "k8s"))
