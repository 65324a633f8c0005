"""Read a program's metrics over HTTP, in Prometheus' text format."""

from __future__ import annotations

import http.client
import urllib.request

from serving.errors import ServingError
from soa.errors import needs_extra

_LARGEST = 1 << 24  # bytes of a page that are read


def read_page(url: str, within_s: float = 2.0) -> bytes:
    """Read the page at a URL, without any web proxy. What is beyond 16 MiB is cut off.

    `within_s`: the longest wait for each part of the answer. Raises OSError, also for an error
    status.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=within_s) as reply:
            return bytes(reply.read(_LARGEST))
    except http.client.HTTPException as error:  # for instance the port speaks another protocol
        raise OSError(f"{url} does not answer in HTTP: {error!r}") from None


def sum_metrics(text: str, **labels: str) -> dict[str, float]:
    """Add up each metric of a page over its series that have these labels; returns sums by metric.

    Raises ValueError if `text` is not in Prometheus' format, and ServingError if the parser is not
    installed.
    """
    with needs_extra("serve", ServingError):
        from prometheus_client.parser import text_string_to_metric_families
    try:
        families = list(text_string_to_metric_families(text))
    except IndexError:  # raised by the parser for a cut line
        raise ValueError("not in Prometheus' text format") from None
    totals: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                # The parser calls a counter x_total, even if the text does not.
                name = sample.name.removesuffix("_total")
                totals[name] = totals.get(name, 0.0) + sample.value
    return totals
