"""Values for the SuperSONIC Helm chart, the one that CMS runs its Triton servers with.

The chart: https://github.com/fastmachinelearning/SuperSONIC, helm/supersonic, Apache-2.0. The
schema beside this file is its `values.schema.json` as it was published, by which every file is
checked before it is written. The values are whole, so that they are valid by themselves; of
components that we leave off, unused.yaml says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from serving.cluster.command import EXECUTABLE, GRPC, HTTP, METRICS, READY, arguments
from serving.cluster.metrics import SCRAPE_S, queue_query
from serving.cluster.needs import RESOURCES, SHM_MIB, Plan
from serving.errors import ServingError

SCHEMA = Path(__file__).with_name("supersonic-values.schema.json")
_UNUSED = Path(__file__).with_name("unused.yaml")
ENVOY_IMAGE = "envoyproxy/envoy:v1.39.1"  # the chart's

Values = dict[str, Any]


def helm_values(plan: Plan) -> Values:
    """The values, checked against the chart's schema."""
    unused: Values = yaml.safe_load(_UNUSED.read_text())
    values = {
        "nameOverride": plan.name,
        "serverLoadMetric": queue_query(plan.model, plan.name),
        "serverLoadThreshold": plan.queue_ms,
        "triton": _triton(plan),
        "envoy": _envoy(plan),
        "keda": _keda(plan),
        "prometheus": _prometheus(plan),
        **unused,
    }
    check_values(values)
    return values


def check_values(values: Values) -> None:
    """Raise ServingError, naming the value, for what the chart's schema refuses."""
    checker = schema_reader()(json.loads(SCHEMA.read_text()))
    for error in checker.iter_errors(values):
        where = ".".join(map(str, error.absolute_path)) or "the values"
        raise ServingError(f"the chart's schema refuses {where}: {error.message}")


def schema_reader() -> Any:
    """The class that checks by a schema; raises ServingError where its library is missing."""
    try:
        from jsonschema import Draft202012Validator
    except ImportError as error:
        raise ServingError(
            f"--helm needs jsonschema ({error}): pip install 'soa-pipeline[cluster]'"
        ) from None
    return Draft202012Validator


def remarks(plan: Plan) -> list[str]:
    """What the chart cannot do for this version, in words."""
    if plan.shm_mib <= SHM_MIB:
        return []
    return [
        f"the largest requests want {plan.shm_mib} MiB of /dev/shm, and the chart leaves a server "
        f"{SHM_MIB}: send fewer rows at once, or use --manifests"
    ]


def _triton(plan: Plan) -> Values:
    ready = f"curl -sf http://localhost:{HTTP}{READY} > /dev/null && [ ! -f /tmp/shutdown ]"
    return {
        "replicas": plan.min_servers,
        "image": plan.image,
        "command": [EXECUTABLE],
        "args": arguments(plan),
        "resources": {"limits": plan.resources, "requests": plan.resources},
        "annotations": provenance(plan),
        "nodeSelector": plan.node_selector,
        "tolerations": tolerations(plan),
        "affinity": {},
        "modelRepository": {"enabled": True, "mountPath": plan.storage.mount, **_storage(plan)},
        "service": {
            "labels": {},
            "annotations": {},
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
                for name, port in (("http", HTTP), ("grpc", GRPC), ("metrics", METRICS))
            ],
        },
        "readinessProbe": {
            "reset": False,
            "initialDelaySeconds": 0,
            "periodSeconds": 5,
            "failureThreshold": 3,
            "command": ["/bin/sh", "-c", ready],
            "timeoutSeconds": 5,
            "successThreshold": 1,
        },
        "startupProbe": {
            "reset": False,
            "initialDelaySeconds": 0,
            "periodSeconds": 5,
            "failureThreshold": 120,
            "timeoutSeconds": 5,
            "httpGet": {"path": READY, "port": "http"},
        },
    }


def provenance(plan: Plan) -> dict[str, str]:
    """Which version it is, for those who look at the objects."""
    return {
        "soa-pipeline/version": plan.version,
        "soa-pipeline/digest": plan.digest,
        "soa-pipeline/target": str(plan.target),
    }


def tolerations(plan: Plan) -> list[dict[str, str]]:
    """GPU nodes are commonly closed to what does not ask for a GPU."""
    if plan.vendor not in RESOURCES:
        return []
    return [{"key": RESOURCES[plan.vendor], "operator": "Exists", "effect": "NoSchedule"}]


def _storage(plan: Plan) -> Values:
    storage = plan.storage
    if storage.kind == "pvc":
        return {"storageType": "pvc", "pvc": {"claimName": storage.source}}
    if storage.kind == "nfs":
        server, _, path = storage.source.partition(":")
        return {"storageType": "nfs", "nfs": {"server": server, "path": path}}
    return {"storageType": "cvmfs-pvc"}


def _envoy(plan: Plan) -> Values:
    resources = {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"cpu": 8, "memory": "4Gi"}}
    command = ["--config-path", "/etc/envoy/envoy.yaml", "--log-level", "info"]
    return {
        "enabled": True,
        "replicas": 1,
        "image": ENVOY_IMAGE,
        "args": [*command, "--log-path", "/dev/stdout"],
        "external_config": {
            "load_from_configmap": False, "configmap_name": "", "configmap_key": "",
        },
        "resources": resources,
        "annotations": {},
        "nodeSelector": {},
        "tolerations": [],
        "service": {
            "type": "ClusterIP",
            "ports": [
                {"name": "grpc", "port": 8001, "targetPort": 8001},
                {"name": "admin", "port": 9901, "targetPort": 9901},
            ],
        },
        "ingress": {
            "enabled": False, "hostName": "", "ingressClassName": "", "annotations": {},
        },
        "grpc_route_timeout": "0s",  # the client's deadline rules
        "rate_limiter": {
            "listener_level": {
                "enabled": True,
                "max_tokens": plan.connections_per_s,
                "tokens_per_fill": plan.connections_per_s,
                "fill_interval": "1s",
            },
            # By the same metric and limit as KEDA: who asks for the list of models while the queues
            # are too long is sent away, and may compute elsewhere.
            "prometheus_based": {"enabled": True, "luaConfig": "cfg/envoy-filter.lua"},
        },
        "loadBalancerPolicy": "LEAST_REQUEST",
        "auth": {
            "enabled": False, "jwt_issuer": "", "jwt_remote_jwks_uri": "", "audiences": [],
            "url": "", "port": 443,
        },
        "tracing_sampling_rate": 0,
    }  # fmt: skip


def _keda(plan: Plan) -> Values:
    return {
        "enabled": plan.max_servers > plan.min_servers,
        "metricType": "Value",  # for chart versions that have the choice: a time, not a sum
        "minReplicaCount": plan.min_servers,
        "maxReplicaCount": plan.max_servers,
        "zeroIdleReplicas": False,  # with no server there is no queue that would start the first
        "scaleUp": {"stabilizationWindowSeconds": 30, "periodSeconds": 30, "stepsize": 2},
        "scaleDown": {"stabilizationWindowSeconds": 600, "periodSeconds": 120, "stepsize": 1},
    }


def _prometheus(plan: Plan) -> Values:
    outside = plan.prometheus
    every = f"{SCRAPE_S}s"
    return {
        "external": {
            "enabled": outside is not None,
            "url": outside.host if outside else "",
            "port": outside.port if outside else 443,
            "scheme": outside.scheme if outside else "https",
        },
        "enabled": outside is None,
        "server": {
            "extraFlags": ["web.enable-remote-write-receiver"],
            # The chart insists on these two names.
            "useExistingClusterRoleName": f"{plan.name}-prometheus-role",
            "releaseNamespace": True,
            "persistentVolume": {"enabled": False},
            "resources": {
                "requests": {"cpu": "500m", "memory": "512Mi"},
                "limits": {"cpu": 1, "memory": "1Gi"},
            },
            "retention": "15d",
            "global": {"scrape_interval": every, "evaluation_interval": every},
            "service": {"enabled": True, "servicePort": 9090},
            "configMapOverrideName": "prometheus-config",
            "ingress": {
                "enabled": False, "hostName": "", "hosts": [], "tls": [{"hosts": []}],
                "ingressClassName": "", "annotations": {},
            },
        },
        "serviceAccounts": {"server": {"create": False, "name": f"{plan.name}-prometheus-sa"}},
        "rbac": {"create": False},
        **{part: {"enabled": False} for part in _PROMETHEUS_PARTS},
        "configmapReload": {"prometheus": {"enabled": False}},
    }  # fmt: skip


_PROMETHEUS_PARTS = (
    "alertmanager",
    "pushgateway",
    "kube-state-metrics",
    "prometheus-node-exporter",
    "prometheus-pushgateway",
)
