"""Values for the SuperSONIC chart and plain manifests: valid, and consistent with each other."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from serving.cluster.deployment_files import (
    FILES,
    SCHEMA,
    check_values,
    envoy_config,
    helm_values,
    manifests,
    prometheus_config,
    queue_query,
    remarks,
)
from serving.cluster.needs import Needs
from serving.errors import ServingError
from tests.serving.cluster.conftest import find_prometheus
from tests.serving.cluster.needs import ALL, AMD, CPU, NVIDIA

every_vendor = pytest.mark.parametrize("needs", ALL.values(), ids=ALL)


def objects(needs: Needs) -> dict[tuple[str, str], Any]:
    """The manifests' objects by kind and name, written as YAML and read back."""
    text = yaml.safe_dump_all(o for each in manifests(needs).values() for o in each)
    return {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(text)}


def envoy_takes(envoy: Path, config: dict[str, Any], folder: Path) -> bool:
    """Whether Envoy accepts a configuration, without a warning of deprecated parts."""
    file = folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [envoy, "--mode", "validate", "-c", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return "OK" in done.stdout and "deprecated" not in done.stderr.lower()


# -- the chart -------------------------------------------------------------------------------------


@every_vendor
def test_values_are_valid_and_of_known_names(needs: Needs) -> None:
    """Valid by the chart's schema, also if it refuses every name that it does not list."""
    schema = json.loads(SCHEMA.read_text())
    values = helm_values(needs)
    jsonschema.Draft202012Validator(schema).validate(values)
    found = jsonschema.Draft202012Validator(_closed(schema)).iter_errors(values)
    # Names that the chart's templates read, but its schema does not list.
    allowed = ("'nvidia.com/gpu'", "'amd.com/gpu'", "storageType", "metricType", "timeoutSeconds")
    assert [e.message for e in found if not any(name in e.message for name in allowed)] == []


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed["additionalProperties"] = False
    return closed


@every_vendor
def test_helm_itself_takes_the_values(needs: Needs, tmp_path: Path) -> None:
    """A chart with the schema, and with one template that prints all values."""
    helm = pytest.importorskip("helm_python")
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: supersonic, version: 0.3.1}")
    (tmp_path / "values.yaml").write_text("{}")
    (tmp_path / "values.schema.json").write_bytes(SCHEMA.read_bytes())
    template = "kind: ConfigMap\ndata:\n  all: {{ toYaml .Values | quote }}\n"
    (tmp_path / "templates" / "all.yaml").write_text(template)
    values = helm_values(needs)
    with helm.Chart.load(tmp_path) as chart:
        (text,) = chart.render(values=values, name=needs.name).values()
        assert yaml.safe_load(yaml.safe_load(text)["data"]["all"]) == values
        with pytest.raises(helm.HelmError, match="maxReplicaCount"):
            chart.render(values={**values, "keda": {**values["keda"], "maxReplicaCount": "ten"}})


def test_values_of_each_vendor() -> None:
    cpu, nvidia, amd = (helm_values(needs)["triton"] for needs in (CPU, NVIDIA, AMD))
    assert "nvidia.com/gpu" not in cpu["resources"]["limits"] and cpu["tolerations"] == []
    assert nvidia["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert nvidia["nodeSelector"] == {
        "nvidia.com/gpu.compute.major": "9", "nvidia.com/gpu.compute.minor": "0",
    }  # fmt: skip
    assert nvidia["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert amd["resources"]["requests"][amd["tolerations"][0]["key"]] == 1
    assert cpu["modelRepository"]["pvc"] == {"claimName": "models"}
    assert nvidia["modelRepository"]["storageType"] == "cvmfs-pvc"
    assert "--model-repository=/cvmfs/cms.example.org/models" in nvidia["args"]
    nfs = {"server": "files.example.org", "path": "/export/models"}
    assert amd["modelRepository"]["nfs"] == nfs and "--load-model=jets" in amd["args"]


def test_values_of_scaling_and_its_metric() -> None:
    own, outside = helm_values(CPU), helm_values(AMD)
    assert own["serverLoadMetric"] == queue_query("jets", own["nameOverride"])
    assert own["serverLoadThreshold"] == 20
    assert own["prometheus"]["enabled"] and not outside["prometheus"]["enabled"]
    assert outside["prometheus"]["external"] == {
        "enabled": True, "url": "metrics.example.org", "port": 443, "scheme": "https",
    }  # fmt: skip
    # The chart's templates fail with any other names.
    assert own["prometheus"]["server"]["useExistingClusterRoleName"] == "jets-prometheus-role"
    assert own["prometheus"]["serviceAccounts"]["server"]["name"] == "jets-prometheus-sa"


def test_what_the_chart_refuses_or_cannot_do() -> None:
    values = helm_values(CPU)
    values["envoy"]["rate_limiter"]["listener_level"]["max_tokens"] = "many"
    with pytest.raises(ServingError, match=r"envoy\.rate_limiter\.listener_level\.max_tokens.*man"):
        check_values(values)
    assert remarks(CPU) == []
    (said,) = remarks(NVIDIA)
    assert "700 MiB of /dev/shm" in said and "--manifests" in said


# -- the manifests ---------------------------------------------------------------------------------


@every_vendor
def test_kubernetes_takes_what_is_its_own(needs: Needs) -> None:
    """The validation is strict: no field that the API does not have."""
    kubernetes = pytest.importorskip("kubernetes_validate")
    built_in = [
        o for o in objects(needs).values() if o["apiVersion"] in ("apps/v1", "v1", "policy/v1")
    ]
    assert len(built_in) >= 7
    for each in built_in:
        kubernetes.validate(each, kubernetes.latest_version(), strict=True)


@every_vendor
def test_manifests_fit_each_other(needs: Needs) -> None:
    found = objects(needs)
    assert set(manifests(needs)) <= set(FILES)
    pods = {
        name: o["spec"]["template"] for (kind, name), o in found.items() if kind == "Deployment"
    }
    labels = {name: pod["metadata"]["labels"] for name, pod in pods.items()}
    for (kind, name), each in found.items():
        spec = each.get("spec", {})
        if kind == "Deployment":
            assert spec["selector"]["matchLabels"] == labels[name]
            volumes = {volume["name"]: volume for volume in pods[name]["spec"]["volumes"]}
            (container,) = pods[name]["spec"]["containers"]
            assert {m["name"] for m in container["volumeMounts"]} == set(volumes)
            if "config" in volumes:
                config = found["ConfigMap", volumes["config"]["configMap"]["name"]]
                (file,) = config["data"]
                assert any(arg.endswith(f"/{file}") for arg in container["args"])
        elif kind == "Service":
            (served,) = [pods[name] for name in pods if labels[name] == spec["selector"]]
            names = {p["name"] for p in served["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in spec["ports"]} <= names
        elif kind in ("PodDisruptionBudget", "ServiceMonitor"):
            assert spec["selector"]["matchLabels"] in labels.values()
        elif kind == "ScaledObject":
            assert spec["scaleTargetRef"]["name"] in pods


@every_vendor
def test_the_chart_and_the_manifests_say_the_same(needs: Needs) -> None:
    values, found = helm_values(needs), objects(needs)
    pod = found["Deployment", "jets-triton"]["spec"]["template"]["spec"]
    (triton,) = pod["containers"]
    of_chart = values["triton"]
    for key in ("image", "command", "args", "resources"):
        assert triton[key] == of_chart[key]
    for key in ("nodeSelector", "tolerations"):
        assert pod[key] == of_chart[key]
    scaled = ("ScaledObject", "jets-triton") in found
    assert scaled == values["keda"]["enabled"] == (needs is not AMD)
    # Either KEDA or the deployment sets the number: two would undo each other's changes.
    assert found["Deployment", "jets-triton"]["spec"].get("replicas") == (None if scaled else 1)
    if scaled:
        spec = found["ScaledObject", "jets-triton"]["spec"]
        metadata = spec["triggers"][0]["metadata"]
        assert metadata["query"] == values["serverLoadMetric"]
        assert metadata["threshold"] == str(values["serverLoadThreshold"])
        behaviour = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        for way in ("scaleUp", "scaleDown"):
            chart, (step,) = values["keda"][way], behaviour[way]["policies"]
            assert (step["value"], step["periodSeconds"]) == (
                chart["stepsize"], chart["periodSeconds"],
            )  # fmt: skip


@pytest.mark.parametrize(
    ("needs", "volume"),
    [
        (CPU, {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}),
        (NVIDIA, {"persistentVolumeClaim": {"claimName": "cvmfs", "readOnly": True}}),
        (AMD, {"nfs": {"server": "files.example.org", "path": "/export/models", "readOnly": True}}),
    ],
)
def test_volumes(needs: Needs, volume: dict[str, Any]) -> None:
    found = objects(needs)
    models, shm = found["Deployment", "jets-triton"]["spec"]["template"]["spec"]["volumes"]
    assert models == {"name": "models", **volume}
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{needs.shm_mib}Mi"}
    assert (("PersistentVolumeClaim", "cvmfs") in found) == (needs is NVIDIA)


def test_a_prometheus_of_its_own_or_of_others() -> None:
    own, outside = objects(CPU), objects(AMD)
    address = own["ScaledObject", "jets-triton"]["spec"]["triggers"][0]["metadata"]["serverAddress"]
    assert address == "http://jets-prometheus:9090"
    assert own["Service", "jets-prometheus"]["spec"]["ports"][0]["port"] == 9090
    assert ("Service", "jets-prometheus") not in outside
    assert ("ServiceMonitor", "jets-triton") in outside
    config = yaml.safe_load(own["ConfigMap", "jets-prometheus"]["data"]["prometheus.yml"])
    for job in config["scrape_configs"]:
        (looked_up,) = job["dns_sd_configs"]
        (service,) = looked_up["names"]
        spec = own["Service", service]["spec"]
        assert spec["clusterIP"] == "None"  # one address for each server
        (pod,) = [
            o["spec"]["template"]["spec"]
            for (kind, _), o in own.items()
            if kind == "Deployment" and o["spec"]["selector"]["matchLabels"] == spec["selector"]
        ]
        ports = [port["containerPort"] for port in pod["containers"][0]["ports"]]
        assert looked_up["port"] in ports


def test_text_of_others_stays_text() -> None:
    """Also text that has a meaning in YAML, in the templates, or in PromQL."""
    odd = "a: \"b\", {{ 7 * 7 }} {% raw %} # 'x'\n- ]} é & *y"
    needs = replace(AMD, model=odd, version=odd)
    plain, found = objects(AMD), objects(needs)
    assert found.keys() == plain.keys()
    pod = found["Deployment", "jets-triton"]["spec"]["template"]
    assert pod["metadata"]["annotations"]["soa-pipeline/version"] == odd
    assert f"--load-model={odd}" in pod["spec"]["containers"][0]["args"]
    assert f"--load-model={odd}" in helm_values(needs)["triton"]["args"]


# -- configurations --------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 100])
def test_a_real_envoy_takes_the_configuration(
    envoy: Path, limit: int | None, tmp_path: Path
) -> None:
    servers = [("jets-triton", 8001), ("127.0.0.1", 8001)]
    config = envoy_config(
        servers, grpc=("0.0.0.0", 8001), stats=("0.0.0.0", 9902), connections_per_s=limit
    )
    assert envoy_takes(envoy, config, tmp_path)
    text = objects(CPU)["ConfigMap", "jets-envoy"]["data"]["envoy.yaml"]
    assert envoy_takes(envoy, yaml.safe_load(text), tmp_path)


def test_envoy_shows_only_harmless_pages() -> None:
    config = envoy_config([("a", 3)], grpc=("0.0.0.0", 1), stats=("0.0.0.0", 2))
    clients, stats = config["static_resources"]["listeners"]
    assert "listener_filters" not in clients
    manager = stats["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    pages = [{"path": "/ready"}, {"path": "/stats/prometheus"}]
    assert [each["match"] for each in host["routes"]] == pages


def test_prometheus_takes_the_configurations(tmp_path: Path) -> None:
    tool = find_prometheus("promtool")
    rule = {"record": "queue_ms", "expr": queue_query("Jet_Tagger.v2", "jet-tagger-v2")}
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "q", "rules": [rule]}]})
    )
    local = prometheus_config("jets", ["127.0.0.1:1"], ["127.0.0.1:2"])
    text = objects(CPU)["ConfigMap", "jets-prometheus"]["data"]["prometheus.yml"]
    for config in (local, yaml.safe_load(text)):
        file = tmp_path / "prometheus.yml"
        file.write_text(yaml.safe_dump({**config, "rule_files": [str(tmp_path / "rules.yml")]}))
        done = subprocess.run([tool, "check", "config", file], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "is valid prometheus config" in done.stdout and "1 rules found" in done.stdout
