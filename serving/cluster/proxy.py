"""The proxy before the servers: one configuration, in a cluster's ConfigMap and on this host alike.

Each request goes to the server with fewer requests under way. A server that does not answer for its
health, by gRPC as Triton does, gets none until it does again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Address = tuple[str, int]
"""Host, by name or number, and port."""

HEALTH_S = 2
"""Between two health checks of a server, which may take half of it; two bad ones are enough."""

SERVER_OPTION = "--grpc-http2-max-ping-strikes=0"
"""Of tritonserver: else it hangs up on who asks it often whether it is there."""

# So that a request in a server that hangs is taken elsewhere, without waiting for its deadline.
_PINGS = {"connection_keepalive": {"interval": f"{HEALTH_S}s", "timeout": f"{HEALTH_S}s"}}

_TYPE = "type.googleapis.com/envoy.extensions"
_HTTP_OPTIONS = f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions"
_SERVERS, _ADMIN = "triton", "admin"


@dataclass(frozen=True)
class Proxy:
    """Where it listens: for clients, for probes and Prometheus, and for its administrator.

    `servers`: a name that stands for several hosts gives as many servers. `connections_per_s`:
    how many new clients it lets in; None for all.
    """

    servers: Sequence[Address]
    grpc: Address
    stats: Address
    admin: Address = ("127.0.0.1", 9901)
    connections_per_s: int | None = None


def envoy_config(proxy: Proxy) -> dict[str, Any]:
    """Envoy's bootstrap configuration."""
    return {
        "admin": {"address": _address(proxy.admin)},
        "static_resources": {
            "listeners": [_clients(proxy), _stats(proxy)],
            "clusters": [_servers(proxy), _admin(proxy)],
        },
    }


def _clients(proxy: Proxy) -> dict[str, Any]:
    route = {
        "cluster": _SERVERS,
        "timeout": "0s",  # the client's deadline rules
        # To run a model twice does no harm. A request of more than the connection's buffer (1 MiB)
        # is not kept here, and its client tries again itself.
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset,unavailable",
            "num_retries": 2,
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": {
                        "@type": f"{_TYPE}.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                    },
                }
            ],
            "host_selection_retry_max_attempts": 3,
        },
    }
    listener = _listener("clients", proxy.grpc, [{"match": {"prefix": "/"}, "route": route}])
    if proxy.connections_per_s is not None:
        kind = "listener.local_ratelimit"
        listener["listener_filters"] = [
            {
                "name": f"envoy.filters.{kind}",
                "typed_config": {
                    "@type": f"{_TYPE}.filters.{kind}.v3.LocalRateLimit",
                    "stat_prefix": "new_clients",
                    "token_bucket": {
                        "max_tokens": proxy.connections_per_s,
                        "tokens_per_fill": proxy.connections_per_s,
                        "fill_interval": "1s",
                    },
                },
            }
        ]
    return listener


def _stats(proxy: Proxy) -> dict[str, Any]:
    """Of the administrator's pages, the two that harm nobody: others can stop the proxy."""
    pages = [
        {"match": {"path": path}, "route": {"cluster": _ADMIN}}
        for path in ("/ready", "/stats/prometheus")
    ]
    return _listener("stats", proxy.stats, pages)


def _listener(name: str, at: Address, routes: list[dict[str, Any]]) -> dict[str, Any]:
    manager = {
        "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {
            "name": name,
            "virtual_hosts": [{"name": name, "domains": ["*"], "routes": routes}],
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"},
            }
        ],
    }
    chain = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    return {"name": name, "address": _address(at), "filter_chains": [{"filters": [chain]}]}


def _servers(proxy: Proxy) -> dict[str, Any]:
    limits = ("max_connections", "max_pending_requests", "max_requests")
    return {
        **_cluster(_SERVERS, proxy.servers),
        "type": "STRICT_DNS",
        "dns_lookup_family": "V4_PREFERRED",
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS.removeprefix("type.googleapis.com/"): {
                "@type": _HTTP_OPTIONS,
                "explicit_http_config": {"http2_protocol_options": _PINGS},
            }
        },
        "health_checks": [
            {
                "interval": f"{HEALTH_S}s",
                "no_traffic_interval": f"{HEALTH_S}s",  # else a minute
                "timeout": f"{HEALTH_S / 2:g}s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "grpc_health_check": {},
            }
        ],
        "ignore_health_on_host_removal": True,
        "outlier_detection": _OUTLIERS,
        # Better no answer, and the client computes elsewhere, than one from a server known as bad.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        # The queues are Triton's, with its own limits; Envoy's of 1024 would come first.
        "circuit_breakers": {
            "thresholds": [dict.fromkeys(limits, 100_000) | {"max_retries": 1000}]
        },
    }


# By broken connections alone: a server that answers with an error may do so because the request was
# wrong, and one client must not be able to have all servers put aside.
_OUTLIERS = {
    "split_external_local_origin_errors": True,
    "consecutive_local_origin_failure": 3,
    "enforcing_consecutive_5xx": 0,
    "enforcing_consecutive_gateway_failure": 0,
    "enforcing_success_rate": 0,
    "enforcing_local_origin_success_rate": 0,
    "interval": f"{HEALTH_S}s",
    "base_ejection_time": "5s",
    "max_ejection_percent": 50,
}


def _admin(proxy: Proxy) -> dict[str, Any]:
    return {**_cluster(_ADMIN, [proxy.admin]), "type": "STATIC", "connect_timeout": "1s"}


def _cluster(name: str, endpoints: Sequence[Address]) -> dict[str, Any]:
    found = [{"endpoint": {"address": _address(each)}} for each in endpoints]
    return {
        "name": name,
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": found}]},
    }


def _address(at: Address) -> dict[str, Any]:
    return {"socket_address": {"address": at[0], "port_value": at[1]}}
