"""The files of a deployment: values for the SuperSONIC Helm chart, or plain Kubernetes manifests.

Each file is a template in templates/, filled with values from `Needs`. The value of every
expression in a template is written as JSON, which is valid YAML: so a user's text cannot change the
structure.

SuperSONIC (https://github.com/fastmachinelearning/SuperSONIC, helm/supersonic, Apache-2.0) is the
chart with which CMS runs its Triton servers. The schema in this folder is its published
`values.schema.json`. The values are complete, so they are valid without the chart's defaults.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from serving.cluster.needs import RESOURCES, SHM_MIB, Needs
from serving.errors import ServingError
from soa.errors import needs_extra

Address = tuple[str, int]
"""The host (a name or an IP address) and the port."""

Object = dict[str, Any]

SCHEMA = Path(__file__).with_name("supersonic-values.schema.json")
FILES = ("triton.yaml", "envoy.yaml", "prometheus.yaml", "monitors.yaml", "scaling.yaml")
"""All manifests that can be written."""

SERVER_OPTION = "--grpc-http2-max-ping-strikes=0"
"""An option of tritonserver. Without it the server closes the connection of a proxy that checks its
health often."""

_ENVOY_IMAGE = "envoyproxy/envoy:v1.39.1"  # the same as in the chart
_EXIT_S = 45  # time for requests in progress to end
_SCRAPE_S = 5
_WINDOW_S = 6 * _SCRAPE_S  # a rate over fewer than four samples is noise


def helm_values(needs: Needs) -> Object:
    """The values for the chart; raises ServingError if the chart's schema refuses one."""
    (values,) = _render("values.yaml", **_shared(needs))
    check_values(values)
    return values


def check_values(values: Object) -> None:
    """Raise ServingError, naming the value, if the chart's schema refuses the values."""
    checker = schema_reader()(json.loads(SCHEMA.read_text()))
    for error in checker.iter_errors(values):
        where = ".".join(map(str, error.absolute_path)) or "the values"
        raise ServingError(f"the chart's schema refuses {where}: {error.message}")


def schema_reader() -> Any:
    """The class that checks values by a schema. Raises ServingError if its library is missing."""
    with needs_extra("cluster", ServingError):
        from jsonschema import Draft202012Validator
    return Draft202012Validator


def remarks(needs: Needs) -> list[str]:
    """Sentences about needs of this version that the chart cannot meet."""
    if needs.shm_mib <= SHM_MIB:
        return []
    return [
        f"the largest requests need {needs.shm_mib} MiB of /dev/shm, and the chart gives a server "
        f"{SHM_MIB}: send fewer rows at once, or use --manifests"
    ]


def manifests(needs: Needs) -> dict[str, list[Object]]:
    """By file: Kubernetes objects like those of the chart. They name no namespace.

    The objects use the built-in groups `apps/v1`, `v1` and `policy/v1`, for scaling KEDA, and if
    the cluster has its own Prometheus, the Prometheus operator.
    """
    triton, stats = f"{needs.name}-triton", f"{needs.name}-envoy-stats:9902"
    files = {"triton.yaml": _render("triton.yaml", **_shared(needs))}
    config = envoy_config(
        [(triton, 8001)],
        grpc=("0.0.0.0", 8001),
        stats=("0.0.0.0", 9902),
        connections_per_s=needs.options.connections_per_s,
    )
    files["envoy.yaml"] = _render("envoy.yaml", **_shared(needs), **_config(config))
    if needs.prometheus is None:
        config = prometheus_config(needs.name, f"{triton}:8002", stats)
        files["prometheus.yaml"] = _render("prometheus.yaml", **_shared(needs), **_config(config))
    else:
        files["monitors.yaml"] = _render("monitors.yaml", **_shared(needs))
    if needs.scales:
        files["scaling.yaml"] = _render("scaling.yaml", **_shared(needs))
    return files


def envoy_config(
    servers: Sequence[Address],
    *,
    grpc: Address,
    stats: Address,
    admin: Address = ("127.0.0.1", 9901),
    connections_per_s: int | None = None,
) -> Object:
    """Bootstrap configuration of the proxy in front of the servers, in a cluster or on one host.

    The proxy listens at `grpc` for clients, at `stats` for probes and Prometheus, and at `admin`
    for its administrator. A name in `servers` may resolve to several hosts: each is a server.
    `connections_per_s`: the limit on new clients in a second; None: no limit.
    """
    (config,) = _render(
        "envoy-config.yaml",
        servers=servers,
        grpc=grpc,
        stats=stats,
        admin=admin,
        connections_per_s=connections_per_s,
        socket=_socket,
        endpoints=lambda of: [{"endpoint": {"address": _socket(each)}} for each in of],
    )
    return config


def _socket(at: Address) -> Object:
    return {"socket_address": {"address": at[0], "port_value": at[1]}}


def prometheus_config(release: str, triton: str | list[str], envoy: str | list[str]) -> Object:
    """The content of prometheus.yml. `triton` and `envoy` are lists of `host:port`, or one
    `service:port` whose name resolves to all hosts."""
    (config,) = _render(
        "prometheus-config.yaml",
        release=release,
        triton=triton,
        envoy=envoy,
        scrape=f"{_SCRAPE_S}s",
    )
    return config


def queue_query(model: str, release: str) -> str:
    """PromQL: the mean wait of requests in the last half minute, in milliseconds.

    The result is always a plain decimal number: 0 if there were no requests or no measurements. The
    chart's Lua filter cannot read NaN or `1e-07`, and would then refuse clients. The label
    `release` distinguishes several deployments in one Prometheus.
    """
    of = f'{{model="{model}",release="{release}"}}[{_WINDOW_S}s]'
    waited_us = f"sum(rate(nv_inference_queue_duration_us{of}))"
    served = f"sum(rate(nv_inference_request_success{of}))"
    return f"round({waited_us} / clamp_min({served}, 0.001) / 1000, 0.001) or vector(0)"


def _shared(needs: Needs) -> dict[str, Any]:
    """The names that templates of the chart and of the manifests use."""
    gpu = RESOURCES.get(needs.vendor)  # GPU nodes often accept only pods that request a GPU
    return {
        "needs": needs,
        "query": queue_query(needs.model, needs.name),
        "arguments": [  # load only this model, with exactly its config.pbtxt
            f"--model-repository={needs.storage.folder}",
            "--model-control-mode=explicit",
            f"--load-model={needs.model}",
            "--disable-auto-complete-config",
            "--http-port=8000",
            "--grpc-port=8001",
            "--metrics-port=8002",
            f"--exit-timeout-secs={_EXIT_S}",
            SERVER_OPTION,
        ],
        "exit_s": _EXIT_S,
        "provenance": {
            "soa-pipeline/version": needs.version,
            "soa-pipeline/digest": needs.digest,
            "soa-pipeline/target": str(needs.target),
        },
        "tolerations": [{"key": gpu, "operator": "Exists", "effect": "NoSchedule"}] if gpu else [],
        "nfs": needs.storage.source.partition(":")[::2],
        "prometheus": urlsplit(needs.prometheus or ""),
        "envoy_image": _ENVOY_IMAGE,
        "scrape": f"{_SCRAPE_S}s",
        "labels": lambda part: {
            "app.kubernetes.io/name": "soa-pipeline",
            "app.kubernetes.io/instance": needs.name,
            "app.kubernetes.io/component": part,
        },
    }


def _config(content: Object) -> dict[str, str]:
    """The data of a ConfigMap: the text and its digest. A new digest starts new pods."""
    text = yaml.safe_dump(content, sort_keys=False, width=100)
    return {"config": text, "digest": hashlib.sha256(text.encode()).hexdigest()}


def _render(template: str, **names: Any) -> list[Object]:
    """Fill a template; return the objects in its YAML text."""
    return list(yaml.safe_load_all(_templates().get_template(template).render(names)))


@cache
def _templates() -> Any:
    with needs_extra("cluster", ServingError):
        import jinja2
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        finalize=json.dumps,
        trim_blocks=True,
        lstrip_blocks=True,
    )
