"""Values for the SuperSONIC chart, by the chart's own schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from serving.cluster.helm import SCHEMA, check_values, helm_values, remarks
from serving.cluster.metrics import queue_query
from serving.cluster.needs import Plan
from serving.errors import ServingError
from tests.serving.cluster.plans import ALL, AMD, CPU, NVIDIA


@pytest.mark.parametrize("plan", ALL.values(), ids=ALL)
def test_they_are_valid_and_of_known_names(plan: Plan) -> None:
    """Valid by the schema as it stands, and by one that refuses every name it does not list."""
    schema = json.loads(SCHEMA.read_text())
    values = helm_values(plan)
    jsonschema.Draft202012Validator(schema).validate(values)
    found = jsonschema.Draft202012Validator(_closed(schema)).iter_errors(values)
    # What the chart's templates read, but its schema leaves out.
    allowed = ("'nvidia.com/gpu'", "'amd.com/gpu'", "storageType", "metricType", "timeoutSeconds")
    assert [e.message for e in found if not any(name in e.message for name in allowed)] == []


@pytest.mark.parametrize("plan", ALL.values(), ids=ALL)
def test_helm_itself_takes_them(plan: Plan, tmp_path: Path) -> None:
    """In a chart with the schema, of which one template says the whole of the values."""
    helm = pytest.importorskip("helm_python")
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: supersonic, version: 0.3.1}")
    (tmp_path / "values.yaml").write_text("{}")
    (tmp_path / "values.schema.json").write_bytes(SCHEMA.read_bytes())
    template = "kind: ConfigMap\ndata:\n  all: {{ toYaml .Values | quote }}\n"
    (tmp_path / "templates" / "all.yaml").write_text(template)
    values = helm_values(plan)
    with helm.Chart.load(tmp_path) as chart:
        (text,) = chart.render(values=values, name=plan.name).values()
        assert yaml.safe_load(yaml.safe_load(text)["data"]["all"]) == values
        with pytest.raises(helm.HelmError, match="maxReplicaCount"):
            chart.render(values={**values, "keda": {**values["keda"], "maxReplicaCount": "ten"}})


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed["additionalProperties"] = False
    return closed


def test_vendors() -> None:
    of = {name: helm_values(plan)["triton"] for name, plan in ALL.items()}
    assert "nvidia.com/gpu" not in of["cpu"]["resources"]["limits"]
    assert of["nvidia"]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert of["nvidia"]["nodeSelector"] == {
        "nvidia.com/gpu.compute.major": "9", "nvidia.com/gpu.compute.minor": "0",
    }  # fmt: skip
    assert of["amd"]["resources"]["requests"]["amd.com/gpu"] == 1
    assert [of[name]["tolerations"][0]["key"] for name in ("nvidia", "amd")] == [
        "nvidia.com/gpu", "amd.com/gpu",
    ]  # fmt: skip


def test_where_the_models_lie() -> None:
    of = {name: helm_values(plan)["triton"] for name, plan in ALL.items()}
    assert of["cpu"]["modelRepository"]["pvc"] == {"claimName": "models"}
    assert of["nvidia"]["modelRepository"]["storageType"] == "cvmfs-pvc"
    assert "--model-repository=/cvmfs/cms.example.org/models" in of["nvidia"]["args"]
    assert of["amd"]["modelRepository"]["nfs"] == {
        "server": "files.example.org", "path": "/export/models",
    }  # fmt: skip
    assert "--load-model=jets" in of["amd"]["args"]


def test_scaling_and_its_metric() -> None:
    own, outside = helm_values(CPU), helm_values(AMD)
    assert own["serverLoadMetric"] == queue_query("jets", own["nameOverride"])
    assert own["serverLoadThreshold"] == 20
    assert own["keda"]["enabled"] and not outside["keda"]["enabled"]  # from 1 to 1
    assert own["prometheus"]["enabled"] and not outside["prometheus"]["enabled"]
    assert outside["prometheus"]["external"] == {
        "enabled": True, "url": "metrics.example.org", "port": 443, "scheme": "https",
    }  # fmt: skip
    # The chart's templates stop over any other names.
    assert own["prometheus"]["server"]["useExistingClusterRoleName"] == "jets-prometheus-role"
    assert own["prometheus"]["serviceAccounts"]["server"]["name"] == "jets-prometheus-sa"


def test_what_the_schema_refuses_is_named() -> None:
    values = helm_values(CPU)
    values["envoy"]["rate_limiter"]["listener_level"]["max_tokens"] = "many"
    with pytest.raises(
        ServingError, match=r"refuses envoy\.rate_limiter\.listener_level\.max_tokens: 'many' is"
    ):
        check_values(values)


def test_what_the_chart_cannot_do() -> None:
    assert remarks(CPU) == []
    (said,) = remarks(NVIDIA)
    assert "700 MiB of /dev/shm" in said and "--manifests" in said
