"""Values for the SuperSONIC chart, and the configuration of the local proxy: both valid."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from serving.cluster.deployment_files import envoy_config, helm_values, queue_query, remarks
from serving.cluster.needs import Needs
from tests.serving.cluster.conftest import find_prometheus
from tests.serving.cluster.needs import ALL, AMD, CPU, NVIDIA, SCHEMA, VALUES, installed

every_vendor = pytest.mark.parametrize("needs", ALL.values(), ids=ALL)


@every_vendor
def test_values_are_valid_and_of_known_names(needs: Needs) -> None:
    """Valid by the chart's schema, also if it refuses every name that it does not list."""
    schema = json.loads(SCHEMA.read_text())
    values = installed(helm_values(needs))
    jsonschema.Draft202012Validator(schema).validate(values)
    errors = jsonschema.Draft202012Validator(_closed(schema)).iter_errors(values)
    # Names that the chart's templates read, but its schema does not list.
    allowed = ("'nvidia.com/gpu'", "'amd.com/gpu'", "storageType", "metricType")
    messages = [error.message for error in errors]
    assert [text for text in messages if not any(name in text for name in allowed)] == []


def _closed(schema: Any) -> Any:
    """The schema, refusing every name that it does not list."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed["additionalProperties"] = False
    return closed


def chart(folder: Path) -> Path:
    """A chart with the schema, and with one template that prints all values."""
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text("{apiVersion: v2, name: supersonic, version: 0.3.1}")
    (folder / "values.yaml").write_bytes(VALUES.read_bytes())
    (folder / "values.schema.json").write_bytes(SCHEMA.read_bytes())
    template = "kind: ConfigMap\ndata:\n  all: {{ toYaml .Values | quote }}\n"
    (folder / "templates" / "all.yaml").write_text(template)
    return folder


@every_vendor
def test_helm_itself_takes_the_values(needs: Needs, tmp_path: Path) -> None:
    helm = pytest.importorskip("helm_python")
    values = helm_values(needs)
    with helm.Chart.load(chart(tmp_path)) as loaded:
        (text,) = loaded.render(values=values, name=needs.name).values()
    assert yaml.safe_load(yaml.safe_load(text)["data"]["all"]) == installed(values)


@every_vendor
def test_helm_itself_refuses_values_of_another_type(needs: Needs, tmp_path: Path) -> None:
    helm = pytest.importorskip("helm_python")
    values = helm_values(needs)
    wrong = {**values, "keda": {**values["keda"], "maxReplicaCount": "ten"}}
    with (
        helm.Chart.load(chart(tmp_path)) as loaded,
        pytest.raises(helm.HelmError, match="maxReplicaCount"),
    ):
        loaded.render(values=wrong, name=needs.name)


def test_values_for_cpus_ask_for_no_gpu() -> None:
    cpu = helm_values(CPU)["triton"]
    assert "nvidia.com/gpu" not in cpu["resources"]["limits"]
    assert cpu["tolerations"] == []
    assert cpu["modelRepository"]["pvc"] == {"claimName": "models"}


def test_values_for_nvidia_ask_for_its_gpus() -> None:
    nvidia = helm_values(NVIDIA)["triton"]
    assert nvidia["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert nvidia["nodeSelector"] == {
        "nvidia.com/gpu.compute.major": "9", "nvidia.com/gpu.compute.minor": "0",
    }  # fmt: skip
    assert nvidia["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert nvidia["modelRepository"]["storageType"] == "cvmfs-pvc"
    assert "--model-repository=/cvmfs/cms.example.org/models" in nvidia["args"]


def test_values_for_amd_ask_for_its_gpus() -> None:
    amd = helm_values(AMD)["triton"]
    assert amd["resources"]["requests"][amd["tolerations"][0]["key"]] == 1
    nfs = {"server": "files.example.org", "path": "/export/models"}
    assert amd["modelRepository"]["nfs"] == nfs
    assert "--load-model=jets" in amd["args"]


def test_servers_are_added_by_the_time_that_requests_wait() -> None:
    values = installed(helm_values(CPU))
    assert values["serverLoadMetric"] == queue_query("jets", values["nameOverride"])
    assert values["serverLoadThreshold"] == CPU.queue_ms


def test_values_name_the_accounts_of_a_prometheus_of_its_own() -> None:
    """The chart's templates fail with any other names."""
    prometheus = installed(helm_values(CPU))["prometheus"]
    assert prometheus["enabled"]
    assert prometheus["server"]["useExistingClusterRoleName"] == "jets-prometheus-role"
    assert prometheus["serviceAccounts"]["server"]["name"] == "jets-prometheus-sa"


def test_values_give_the_address_of_a_prometheus_outside() -> None:
    prometheus = installed(helm_values(AMD))["prometheus"]
    assert not prometheus["enabled"]
    assert prometheus["external"] == {
        "enabled": True, "url": "metrics.example.org", "port": 443, "scheme": "https",
    }  # fmt: skip


def test_a_need_that_the_chart_cannot_meet_is_a_remark() -> None:
    assert remarks(CPU) == []
    (remark,) = remarks(NVIDIA)
    assert "700 MiB of /dev/shm" in remark


def test_text_of_others_stays_text() -> None:
    """Also text that has a meaning in YAML, in the templates, or in PromQL."""
    odd = "a: \"b\", {{ 7 * 7 }} {% raw %} # 'x'\n- ]} é & *y"
    triton = helm_values(replace(AMD, model=odd, version=odd))["triton"]
    assert triton["annotations"]["soa-pipeline/version"] == odd
    assert f"--load-model={odd}" in triton["args"]
    assert triton.keys() == helm_values(AMD)["triton"].keys()


def test_a_real_envoy_takes_the_configuration(envoy: Path, tmp_path: Path) -> None:
    servers = [("jets-triton", 8001), ("127.0.0.1", 8001)]
    file = tmp_path / "envoy.yaml"
    config = envoy_config(servers, grpc=("0.0.0.0", 8001), stats=("0.0.0.0", 9902))
    file.write_text(yaml.safe_dump(config))
    process = subprocess.run(
        [envoy, "--mode", "validate", "-c", file], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "OK" in process.stdout
    assert "deprecated" not in process.stderr.lower()


def test_envoy_shows_only_harmless_pages() -> None:
    config = envoy_config([("a", 3)], grpc=("0.0.0.0", 1), stats=("0.0.0.0", 2))
    _, stats = config["static_resources"]["listeners"]
    manager = stats["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    pages = [{"path": "/ready"}, {"path": "/stats/prometheus"}]
    assert [route["match"] for route in host["routes"]] == pages


def test_prometheus_takes_the_query(tmp_path: Path) -> None:
    rule = {"record": "queue_ms", "expr": queue_query("Jet_Tagger.v2", "jet-tagger-v2")}
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "q", "rules": [rule]}]}))
    tool = find_prometheus("promtool")
    process = subprocess.run([tool, "check", "rules", rules], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "1 rules found" in process.stdout
