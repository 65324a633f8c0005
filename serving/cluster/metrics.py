"""What is measured to decide how many servers run, and how Prometheus comes by it.

One query, for KEDA in the manifests, for KEDA and the proxy's Lua filter in the chart, and for the
tests that ask a real Prometheus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

RELEASE = "release"
"""The label by which several deployments in one Prometheus are told apart; the chart's own."""

SCRAPE_S = 5
_WINDOW_S = 6 * SCRAPE_S  # a rate over fewer than four samples is noise
TRITON_METRICS = "/metrics"
ENVOY_METRICS = "/stats/prometheus"


def queue_query(model: str, release: str) -> str:
    """PromQL: the milliseconds that a request of the last half minute waited for its run.

    Always one plain decimal: 0 where nothing was asked or nothing is measured yet. The chart's Lua
    filter reads neither NaN nor `1e-07`, and refuses clients then.
    """
    of = f'{{model="{model}",{RELEASE}="{release}"}}[{_WINDOW_S}s]'
    waited_us = f"sum(rate(nv_inference_queue_duration_us{of}))"
    served = f"sum(rate(nv_inference_request_success{of}))"
    return f"round({waited_us} / clamp_min({served}, 0.001) / 1000, 0.001) or vector(0)"


def static_targets(*addresses: str) -> dict[str, Any]:
    """Servers at known `host:port`s."""
    return {"static_configs": [{"targets": list(addresses)}]}


def dns_targets(service: str, port: int) -> dict[str, Any]:
    """Every server that a headless service has ready; needs no rights in the cluster."""
    looked_up = {"names": [service], "type": "A", "port": port, "refresh_interval": f"{SCRAPE_S}s"}
    return {"dns_sd_configs": [looked_up]}


def prometheus_config(
    release: str, triton: dict[str, Any], envoy: dict[str, Any]
) -> dict[str, Any]:
    """prometheus.yml; `triton` and `envoy` say where they are: `static_targets`, `dns_targets`."""
    times = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    jobs: Sequence[tuple[str, str, dict[str, Any]]] = (
        ("triton", TRITON_METRICS, triton),
        ("envoy", ENVOY_METRICS, envoy),
    )
    return {
        "global": times,
        "scrape_configs": [
            {
                "job_name": f"{release}-{name}",
                "metrics_path": path,
                **where,
                "relabel_configs": [{"target_label": RELEASE, "replacement": release}],
            }
            for name, path, where in jobs
        ],
    }
