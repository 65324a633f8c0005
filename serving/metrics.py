"""Triton's own metrics, in Prometheus' text format, over HTTP."""

from __future__ import annotations

import http.client
import re
import urllib.request

_METRIC = re.compile(
    r'^(nv_\w+)\{[^}]*model="(?P<model>[^"]*)"[^}]*\} (?P<value>\S+)$', re.MULTILINE
)
_LARGEST = 1 << 24


def get(url: str, within_s: float = 2.0) -> bytes:
    """GET past any proxy, up to 16 MB; raises OSError, also for an error status."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=within_s) as reply:
            return bytes(reply.read(_LARGEST))
    except http.client.HTTPException as error:  # as from a port where another protocol is spoken
        raise OSError(f"{url} does not answer in HTTP: {error!r}") from None


def model_counters(text: str, model: str) -> dict[str, float]:
    """What is counted for a model, by metric, summed over its versions."""
    found: dict[str, float] = {}
    for match in _METRIC.finditer(text):
        if match["model"] == model:
            found[match[1]] = found.get(match[1], 0.0) + float(match["value"])
    return found
