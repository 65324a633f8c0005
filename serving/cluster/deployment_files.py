"""Values for the SuperSONIC Helm chart, and the configuration of a local proxy.

Each file is a template in templates/, filled with values from `Needs`. The value of every
expression in a template is written as JSON, which is valid YAML: so a user's text cannot change the
structure.

SuperSONIC (https://github.com/fastmachinelearning/SuperSONIC, helm/supersonic, Apache-2.0) is the
chart with which CMS runs its Triton servers. The values say only what differs from the chart's own.
"""

from __future__ import annotations

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

SERVER_OPTION = "--grpc-http2-max-ping-strikes=0"
"""An option of tritonserver. Without it the server closes the connection of a proxy that checks its
health often."""

_EXIT_S = 45  # the time that requests in progress have to end
# The chart's Prometheus asks every 5 s, and a rate over fewer than four samples is noise.
_WINDOW_S = 30


def helm_values(needs: Needs) -> Object:
    """Return the values for the chart. Raises ServingError if jinja2 is missing."""
    gpu = RESOURCES.get(needs.vendor)
    return _render(
        "values.yaml",
        needs=needs,
        query=queue_query(needs.model, needs.name),
        arguments=[  # load only this model, with exactly its config.pbtxt
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
        provenance={
            "soa-pipeline/version": needs.version,
            "soa-pipeline/digest": needs.digest,
            "soa-pipeline/target": str(needs.target),
        },
        # GPU nodes often accept only pods that tolerate their taint.
        tolerations=[{"key": gpu, "operator": "Exists", "effect": "NoSchedule"}] if gpu else [],
        prometheus=urlsplit(needs.prometheus) if needs.prometheus else None,
    )


def remarks(needs: Needs) -> list[str]:
    """Return sentences about needs of this version that the chart does not meet."""
    if needs.shm_mib <= SHM_MIB:
        return []
    return [
        f"the largest requests need {needs.shm_mib} MiB of /dev/shm, and the chart gives a server "
        f"{SHM_MIB}: send fewer rows at once"
    ]


def envoy_config(
    servers: Sequence[Address],
    *,
    grpc: Address,
    stats: Address,
    admin: Address = ("127.0.0.1", 9901),
) -> Object:
    """Return the bootstrap configuration of an Envoy proxy in front of the servers.

    The proxy listens at `grpc` for clients, at `stats` for probes and Prometheus, and at `admin`
    for its administrator. A name in `servers` may resolve to several hosts: each is a server.
    """
    return _render(
        "envoy.yaml",
        servers=servers,
        grpc=grpc,
        stats=stats,
        admin=admin,
        socket=_socket,
        endpoints=_endpoints,
    )


def _endpoints(addresses: Sequence[Address]) -> list[Object]:
    """Return Envoy's list of the servers in a cluster."""
    return [{"endpoint": {"address": _socket(address)}} for address in addresses]


def _socket(address: Address) -> Object:
    """Return Envoy's description of an address."""
    host, port = address
    return {"socket_address": {"address": host, "port_value": port}}


def queue_query(model: str, release: str) -> str:
    """Return a PromQL query: the mean wait of requests in the last half minute, in milliseconds.

    The result is always a plain decimal number: 0 if there were no requests or no measurements. The
    chart's Lua filter cannot read NaN or `1e-07`, and would then refuse clients. So the divisor is
    at least 0.001 requests a second. The label `release` distinguishes several deployments in one
    Prometheus.
    """
    series = f'{{model="{model}",release="{release}"}}[{_WINDOW_S}s]'
    waited_us = f"sum(rate(nv_inference_queue_duration_us{series}))"
    served = f"sum(rate(nv_inference_request_success{series}))"
    return f"round({waited_us} / clamp_min({served}, 0.001) / 1000, 0.001) or vector(0)"


def _render(template: str, **values: Any) -> Object:
    """Fill a template with values, and return the object that its YAML text describes."""
    rendered: Object = yaml.safe_load(_templates().get_template(template).render(values))  # trusted
    return rendered


@cache
def _templates() -> Any:
    """Return the jinja2 environment of our templates, in which every value is written as JSON.

    Raises ServingError if jinja2 is missing.
    """
    with needs_extra("cluster", ServingError):
        import jinja2
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        finalize=json.dumps,
        trim_blocks=True,
        lstrip_blocks=True,
    )
