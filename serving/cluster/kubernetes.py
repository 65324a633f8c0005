"""Plain Kubernetes manifests: what the chart would install, for those without it.

Servers, the proxy before them, a Prometheus where none is there, and KEDA's rule for how many
servers there are. Built-in kinds are `apps/v1`, `v1` and `policy/v1`; KEDA and, with a Prometheus
of the cluster's own, the Prometheus operator bring the others.
"""

from __future__ import annotations

import hashlib
from typing import Any

import yaml

from serving.cluster.command import EXECUTABLE, EXIT_S, GRPC, HTTP, METRICS, READY, arguments
from serving.cluster.helm import ENVOY_IMAGE, provenance, tolerations
from serving.cluster.metrics import (
    ENVOY_METRICS,
    RELEASE,
    SCRAPE_S,
    TRITON_METRICS,
    dns_targets,
    prometheus_config,
    queue_query,
)
from serving.cluster.needs import Address, Plan
from serving.cluster.proxy import Proxy, envoy_config

Object = dict[str, Any]

FILES = ("triton.yaml", "envoy.yaml", "prometheus.yaml", "monitors.yaml", "scaling.yaml")
"""All that may be written."""

PROMETHEUS_IMAGE = "prom/prometheus:v2.42.0"
_STATS, _PROMETHEUS_PORT = 9902, 9090
_DRAIN_S = 10  # until every proxy has learnt that a server or a proxy goes
_HARDENED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def manifests(plan: Plan) -> dict[str, list[Object]]:
    """The objects, by the file that they go into. They name no namespace."""
    files = {"triton.yaml": _triton(plan), "envoy.yaml": _envoy(plan)}
    if plan.prometheus is None:
        files["prometheus.yaml"] = _prometheus(plan)
    else:
        files["monitors.yaml"] = _monitors(plan)
    if plan.max_servers > plan.min_servers:
        files["scaling.yaml"] = [_scaled_object(plan)]
    return files


def _triton(plan: Plan) -> list[Object]:
    volumes, mounts = _model_volume(plan)
    ready = {"httpGet": {"path": READY, "port": "http"}, "periodSeconds": 5, "timeoutSeconds": 5}
    container = {
        "name": "triton",
        "image": plan.image,
        "command": [EXECUTABLE],
        "args": arguments(plan),
        "ports": _ports(http=HTTP, grpc=GRPC, metrics=METRICS),
        "resources": {"limits": plan.resources, "requests": plan.resources},
        "startupProbe": {**ready, "failureThreshold": 120},  # ten minutes
        "readinessProbe": {**ready, "failureThreshold": 2},
        "livenessProbe": {
            "httpGet": {"path": "/v2/health/live", "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
        },
        "lifecycle": _drain(),
        "securityContext": _HARDENED,
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "containers": [container],
        "terminationGracePeriodSeconds": _DRAIN_S + EXIT_S + 5,
        "nodeSelector": plan.node_selector,
        "tolerations": tolerations(plan),
        "volumes": [
            *volumes,
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{plan.shm_mib}Mi"}},
        ],
    }
    deployment = _deployment(plan, "triton", pod, provenance(plan))
    if plan.max_servers == plan.min_servers:  # else KEDA alone says how many there are
        deployment["spec"]["replicas"] = plan.min_servers
    return [
        *_claim(plan),
        deployment,
        _service(plan, "triton", _service_ports(http=HTTP, grpc=GRPC, metrics=METRICS), None),
        _disruption(plan, "triton"),
    ]


def _model_volume(plan: Plan) -> tuple[list[Object], list[Object]]:
    storage = plan.storage
    if storage.kind == "nfs":
        server, _, path = storage.source.partition(":")
        volume: Object = {"nfs": {"server": server, "path": path, "readOnly": True}}
    else:
        volume = {"persistentVolumeClaim": {"claimName": storage.source, "readOnly": True}}
    mount: Object = {"name": "models", "mountPath": storage.mount, "readOnly": True}
    if storage.kind == "cvmfs":
        mount["mountPropagation"] = "HostToContainer"  # repositories are mounted when first read
    return [{"name": "models", **volume}], [mount]


def _claim(plan: Plan) -> list[Object]:
    """CVMFS as its CSI driver gives it; a claim of the user's own is there already."""
    if plan.storage.kind != "cvmfs":
        return []
    spec = {
        "accessModes": ["ReadOnlyMany"],
        "resources": {"requests": {"storage": "1"}},
        "storageClassName": "cvmfs",
    }
    metadata = {"name": plan.storage.source}
    kind = "PersistentVolumeClaim"
    return [{"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": spec}]


def _envoy(plan: Plan) -> list[Object]:
    proxy = Proxy(
        [(f"{plan.name}-triton", GRPC)],
        ("0.0.0.0", GRPC),
        ("0.0.0.0", _STATS),
        connections_per_s=plan.connections_per_s,
    )
    config, digest = _config_map(plan, "envoy", "envoy.yaml", envoy_config(proxy))
    container = {
        "name": "envoy",
        "image": ENVOY_IMAGE,
        "command": ["envoy"],
        "args": ["-c", "/etc/envoy/envoy.yaml", "--disable-hot-restart", "--log-level", "warning"],
        "ports": _ports(grpc=GRPC, stats=_STATS),
        "resources": {
            "requests": {"cpu": 1, "memory": "1Gi"},
            "limits": {"cpu": 8, "memory": "4Gi"},
        },
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "stats"}, "periodSeconds": 2},
        "livenessProbe": {"tcpSocket": {"port": "stats"}, "periodSeconds": 10},
        "lifecycle": _drain(),
        "securityContext": _HARDENED,
        "volumeMounts": [{"name": "config", "mountPath": "/etc/envoy", "readOnly": True}],
    }
    pod = {
        "containers": [container],
        "terminationGracePeriodSeconds": 60,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 101},  # the image's own
        "volumes": [{"name": "config", "configMap": {"name": config["metadata"]["name"]}}],
    }
    deployment = _deployment(plan, "envoy", pod, digest)
    deployment["spec"]["replicas"] = 2
    return [
        config,
        deployment,
        _service(plan, "envoy", _service_ports(grpc=GRPC, stats=_STATS), "ClusterIP"),
        _disruption(plan, "envoy"),
    ]


def _prometheus(plan: Plan) -> list[Object]:
    """A small one of the deployment's own, which finds servers by name and needs no rights."""
    triton, envoy = (
        dns_targets(f"{plan.name}-{part}", port)
        for part, port in (("triton", METRICS), ("envoy-stats", _STATS))
    )
    content = prometheus_config(plan.name, triton, envoy)
    config, digest = _config_map(plan, "prometheus", "prometheus.yml", content)
    container = {
        "name": "prometheus",
        "image": PROMETHEUS_IMAGE,
        "args": ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.retention.time=2d",
                 "--storage.tsdb.path=/prometheus"],
        "ports": _ports(http=_PROMETHEUS_PORT),
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
        "readinessProbe": {"httpGet": {"path": "/-/ready", "port": "http"}},
        "securityContext": _HARDENED,
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/prometheus", "readOnly": True},
            {"name": "data", "mountPath": "/prometheus"},
        ],
    }  # fmt: skip
    pod = {
        "containers": [container],
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65534, "fsGroup": 65534},
        "volumes": [
            {"name": "config", "configMap": {"name": config["metadata"]["name"]}},
            {"name": "data", "emptyDir": {}},
        ],
    }
    deployment = _deployment(plan, "prometheus", pod, digest)
    deployment["spec"]["replicas"] = 1
    ports = _service_ports(http=_PROMETHEUS_PORT)
    # The proxies one by one: the other service of theirs has one address for all.
    each = _service(plan, "envoy", _service_ports(stats=_STATS), None)
    each["metadata"]["name"] = f"{plan.name}-envoy-stats"
    return [config, deployment, _service(plan, "prometheus", ports, "ClusterIP"), each]


def _monitors(plan: Plan) -> list[Object]:
    """For the operator of a Prometheus that is there."""
    relabel = [{"targetLabel": RELEASE, "replacement": plan.name}]
    found = []
    for part, port, path in (
        ("triton", "metrics", TRITON_METRICS),
        ("envoy", "stats", ENVOY_METRICS),
    ):
        end = {"port": port, "path": path, "interval": f"{SCRAPE_S}s", "relabelings": relabel}
        spec = {"selector": {"matchLabels": _labels(plan, part)}, "endpoints": [end]}
        found.append(_object(plan, "monitoring.coreos.com/v1", "ServiceMonitor", part, spec))
    return found


def _scaled_object(plan: Plan) -> Object:
    address = plan.prometheus or Address("http", f"{plan.name}-prometheus", _PROMETHEUS_PORT)
    trigger = {
        "type": "prometheus",
        "metricType": "Value",  # a time, the same however many servers there are: not a sum
        "metadata": {
            "serverAddress": str(address),
            "query": queue_query(plan.model, plan.name),
            "threshold": str(plan.queue_ms),
        },
    }
    return _object(
        plan, "keda.sh/v1alpha1", "ScaledObject", "triton",
        {
            "scaleTargetRef": {"name": f"{plan.name}-triton"},
            "pollingInterval": 15,
            "minReplicaCount": plan.min_servers,
            "maxReplicaCount": plan.max_servers,
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": {"scaleUp": _step(30, 30, 2), "scaleDown": _step(600, 120, 1)}
                }
            },
            "triggers": [trigger],
        },
    )  # fmt: skip


def _step(window_s: int, period_s: int, servers: int) -> Object:
    policy = {"type": "Pods", "value": servers, "periodSeconds": period_s}
    return {"stabilizationWindowSeconds": window_s, "policies": [policy]}


def _object(plan: Plan, version: str, kind: str, part: str, spec: Object) -> Object:
    metadata = {"name": f"{plan.name}-{part}", "labels": _labels(plan, part)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _labels(plan: Plan, part: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "soa-pipeline",
        "app.kubernetes.io/instance": plan.name,
        "app.kubernetes.io/component": part,
    }


def _deployment(plan: Plan, part: str, pod: Object, annotations: dict[str, str]) -> Object:
    """Without a number of replicas."""
    labels = _labels(plan, part)
    template = {"metadata": {"labels": labels, "annotations": annotations}, "spec": pod}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    return _object(plan, "apps/v1", "Deployment", part, spec)


def _service(plan: Plan, part: str, ports: list[Object], kind: str | None) -> Object:
    """`kind` None: headless, so that its name stands for every server that is ready."""
    one = {"clusterIP": "None"} if kind is None else {"type": kind}
    return _object(
        plan, "v1", "Service", part, {**one, "selector": _labels(plan, part), "ports": ports}
    )


def _disruption(plan: Plan, part: str) -> Object:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": _labels(plan, part)}}
    return _object(plan, "policy/v1", "PodDisruptionBudget", part, spec)


def _config_map(plan: Plan, part: str, file: str, content: Object) -> tuple[Object, dict[str, str]]:
    """With the annotation by which a changed content starts new pods."""
    text = yaml.safe_dump(content, sort_keys=False, width=100)
    metadata = {"name": f"{plan.name}-{part}", "labels": _labels(plan, part)}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {file: text}}
    return config, {"soa-pipeline/config": hashlib.sha256(text.encode()).hexdigest()}


def _ports(**ports: int) -> list[Object]:
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _service_ports(**ports: int) -> list[Object]:
    return [{"name": n, "port": port, "targetPort": n} for n, port in ports.items()]


def _drain() -> Object:
    return {"preStop": {"exec": {"command": ["/bin/sh", "-c", f"sleep {_DRAIN_S}"]}}}
