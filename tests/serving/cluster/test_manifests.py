"""Plain manifests: valid for Kubernetes, and of one piece with each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.cluster.helm import helm_values
from serving.cluster.kubernetes import FILES, manifests
from serving.cluster.needs import Plan
from tests.serving.cluster.plans import ALL, AMD, CPU, NVIDIA
from tests.serving.cluster.test_envoy import validate

BUILT_IN = {"apps/v1", "v1", "policy/v1"}


def objects(plan: Plan) -> dict[tuple[str, str], Any]:
    """By kind and name, as somebody reads them back from YAML."""
    text = yaml.safe_dump_all(o for each in manifests(plan).values() for o in each)
    return {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(text)}


@pytest.mark.parametrize("plan", ALL.values(), ids=ALL)
def test_kubernetes_takes_what_is_its_own(plan: Plan) -> None:
    """Strictly: no field that its API does not have."""
    kubernetes = pytest.importorskip("kubernetes_validate")
    checked = 0
    for each in objects(plan).values():
        if each["apiVersion"] in BUILT_IN:
            kubernetes.validate(each, kubernetes.latest_version(), strict=True)
            checked += 1
    assert checked >= 7


@pytest.mark.parametrize("plan", ALL.values(), ids=ALL)
def test_they_fit_each_other(plan: Plan) -> None:
    found = objects(plan)
    assert set(manifests(plan)) <= set(FILES)
    pods = {
        name: o["spec"]["template"] for (kind, name), o in found.items() if kind == "Deployment"
    }
    for (kind, name), each in found.items():
        if kind == "Deployment":
            assert each["spec"]["selector"]["matchLabels"] == pods[name]["metadata"]["labels"]
            volumes = {volume["name"]: volume for volume in pods[name]["spec"]["volumes"]}
            (container,) = pods[name]["spec"]["containers"]
            assert {m["name"] for m in container["volumeMounts"]} == set(volumes)
            if "config" in volumes:
                config = found["ConfigMap", volumes["config"]["configMap"]["name"]]
                (file,) = config["data"]
                assert any(arg.endswith(f"/{file}") for arg in container["args"])
        elif kind == "Service":
            (served,) = [
                pod
                for pod in pods.values()
                if pod["metadata"]["labels"] == each["spec"]["selector"]
            ]
            names = {p["name"] for p in served["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= names
        elif kind in ("PodDisruptionBudget", "ServiceMonitor"):
            selected = each["spec"]["selector"]["matchLabels"]
            assert selected in [pod["metadata"]["labels"] for pod in pods.values()]
        elif kind == "ScaledObject":
            assert each["spec"]["scaleTargetRef"]["name"] in pods


@pytest.mark.parametrize("plan", ALL.values(), ids=ALL)
def test_the_chart_and_the_manifests_say_the_same(plan: Plan) -> None:
    values, found = helm_values(plan), objects(plan)
    pod = found["Deployment", "jets-triton"]["spec"]["template"]["spec"]
    (triton,) = pod["containers"]
    of_chart = values["triton"]
    for key in ("image", "command", "args", "resources"):
        assert triton[key] == of_chart[key]
    for key in ("nodeSelector", "tolerations"):
        assert pod[key] == of_chart[key]
    scaled = ("ScaledObject", "jets-triton") in found
    assert scaled == values["keda"]["enabled"]
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
        # Two that both set the number would undo each other's work.
        assert "replicas" not in found["Deployment", "jets-triton"]["spec"]
    else:
        assert found["Deployment", "jets-triton"]["spec"]["replicas"] == 1


def test_volumes() -> None:
    for plan, volume in (
        (CPU, {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}),
        (NVIDIA, {"persistentVolumeClaim": {"claimName": "cvmfs", "readOnly": True}}),
        (AMD, {"nfs": {"server": "files.example.org", "path": "/export/models", "readOnly": True}}),
    ):
        found = objects(plan)
        pod = found["Deployment", "jets-triton"]["spec"]["template"]["spec"]
        models, shm = pod["volumes"]
        assert {k: v for k, v in models.items() if k != "name"} == volume
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{plan.shm_mib}Mi"}
        assert (("PersistentVolumeClaim", "cvmfs") in found) == (plan is NVIDIA)


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
        assert spec["clusterIP"] == "None"  # a name for each server, not one for all
        assert looked_up["port"] in [
            port["containerPort"]
            for (kind, _), o in own.items()
            if kind == "Deployment" and o["spec"]["selector"]["matchLabels"] == spec["selector"]
            for port in o["spec"]["template"]["spec"]["containers"][0]["ports"]
        ]


def test_a_real_envoy_takes_its_config_map(envoy: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(objects(CPU)["ConfigMap", "jets-envoy"]["data"]["envoy.yaml"])
    assert "OK" in validate(envoy, config, tmp_path)
