"""Counts and times of calls for Prometheus; off unless PIPELINE_TELEMETRY is set.

`PIPELINE_TELEMETRY=9400` serves them on that port, for this host only. Any other value is a file.
It is written again every few seconds, for node exporter's textfile collector; `{pid}` in its name
is the process number. A failed call also gives a line of JSON in the log `soa_pipeline.telemetry`.
Without the variable nothing is imported, and calls do nothing for telemetry.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from runtime.errors import LoadError
from runtime.process import write_regularly
from soa.errors import needs_extra
from soa.text import logger

if TYPE_CHECKING:
    from runtime.session.origin import Origin

P = ParamSpec("P")
VARIABLE = "PIPELINE_TELEMETRY"
log = logger("soa_pipeline.telemetry")

_LABELS = ("model", "version", "engine", "target")
_BUCKETS = [step * 10.0**k for k in range(-6, 1) for step in (1, 2.5, 5)] + [10.0]  # seconds


class Telemetry:
    """The counts and times of this process's bound calls. Any number of threads may add to it.

    `where`: a port or a file, as in PIPELINE_TELEMETRY. Raises LoadError if it cannot be used.
    """

    def __init__(self, where: str) -> None:
        """Make the counters, and serve or write them from now on."""
        with needs_extra("telemetry", LoadError):
            import prometheus_client as prometheus
        self.registry = prometheus.CollectorRegistry()
        self._seconds = prometheus.Histogram(
            "soa_call_seconds", "Time of a call; on a GPU of its launch.", _LABELS,
            registry=self.registry, buckets=_BUCKETS,
        )  # fmt: skip
        self._rows = prometheus.Counter(
            "soa_rows", "Rows of all row dimensions that were run.", _LABELS, registry=self.registry
        )
        self._failures = prometheus.Counter(
            "soa_failures", "Calls that raised.", (*_LABELS, "error"), registry=self.registry
        )
        self.drift = prometheus.Gauge(
            "soa_drift_psi", "How far a column's values moved from those of the reference.",
            ("model", "version", "column"), registry=self.registry,
        )  # fmt: skip
        self.port: int | None = None
        try:
            if where.isdecimal():
                server, _ = prometheus.start_http_server(
                    int(where), "127.0.0.1", registry=self.registry
                )
                self.port = server.server_port
            else:
                self._write = prometheus.write_to_textfile
                self._file = Path(where.replace("{pid}", str(os.getpid())))
                self.write()  # raises now if the file cannot be written
                write_regularly(self.write, "telemetry")
        except (OSError, OverflowError) as error:  # OverflowError: no such port
            raise LoadError(
                f"{VARIABLE}={where}: {error}: name a free port, or a file in a folder that is "
                "there",
                code="port" if where.isdecimal() else None,
            ) from None

    @contextmanager
    def count_failures(self, origin: Origin | None) -> Iterator[None]:
        """Count and log an exception that leaves the `with` block as a failed call."""
        try:
            yield
        except Exception as error:
            labels = labels_of(origin)
            self._failures.labels(*labels, type(error).__name__).inc()
            attributes = dict(zip(_LABELS, labels, strict=True)) | {"error": str(error)}
            log.warning(json.dumps({"event": "failure", **attributes}))
            raise

    def time_calls(
        self, run: Callable[P, object], origin: Origin | None, n: Callable[[], int]
    ) -> Callable[P, None]:
        """Wrap `run`, the call of an artifact, so that it adds to these counts and times.

        `n`: returns the number of rows of the last call.
        """
        labels = labels_of(origin)
        seconds, rows = self._seconds.labels(*labels), self._rows.labels(*labels)

        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            """Run, and add time and rows. A call that raises is counted as a failure only."""
            start = time.perf_counter()
            with self.count_failures(origin):
                run(*args, **kwargs)
            seconds.observe(time.perf_counter() - start)
            rows.inc(n())

        return call

    def write(self) -> None:
        """Write the file with all counts and times. Does nothing if they are served on a port."""
        if self.port is None:
            self._write(str(self._file), self.registry)


def labels_of(origin: Origin | None) -> tuple[str, str, str, str]:
    """Return the values of `_LABELS` for a session's calls. Without an origin all are empty."""
    if origin is None:
        return ("", "", "", "")
    return (origin.name, origin.version or "", origin.engine, origin.target)


@cache
def telemetry() -> Telemetry | None:
    """Return the telemetry of this process, which the first call starts; None if it is off.

    Raises LoadError if the port or file in PIPELINE_TELEMETRY cannot be used.
    """
    where = os.environ.get(VARIABLE)
    return Telemetry(where) if where else None


def record_drift(model: str, version: str, columns: Mapping[str, float]) -> None:
    """Set the population stability index of each column of a version, if telemetry is on."""
    active = telemetry()
    if active is not None:
        for column, psi in columns.items():
            active.drift.labels(model, version, column).set(psi)
