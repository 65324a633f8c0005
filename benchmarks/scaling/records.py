"""The measurement, as it is stored in JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

QUIET = 0.05
"""The largest use of a core by other work, as a fraction, for which a measurement is quiet."""


@dataclass(frozen=True)
class Probe:
    """Measurement of one client that sends `burst` requests of `rows` rows at a time.

    Seconds are totals over all requests. `client_s`, `triton_s`, `stub_s`: the CPU time of the
    client, of tritonserver and of its Python stub. `inside_s`: Triton's own compute durations.
    `latencies`: the quantiles 0.5 %, 1.5 % … 99.5 % of the time of a round. `others`: the number of
    cores that other programs used.
    """

    rows: int
    burst: int
    requests: int
    runs: int
    client_s: float
    triton_s: float
    stub_s: float
    inside_s: float
    latencies: tuple[float, ...]
    others: float


@dataclass(frozen=True)
class Run:
    """The results of `clients` clients that send one row in a request. Times are in seconds."""

    batching: bool
    clients: int
    rate: float
    p50_s: float
    p99_s: float
    requests_a_run: float
    others: float


@dataclass(frozen=True)
class Measured:
    """A measurement. Probes with the same requests, and runs of the same clients, are repetitions.

    `max_rows`, `preferred`, `delay_us`: the batching settings of the deployed repository.
    `proxy_s`: the CPU time of Envoy for a request; None if there was no Envoy.
    """

    model: str
    when: str
    machine: dict[str, str]
    max_rows: int
    preferred: tuple[int, ...]
    delay_us: int
    probes: tuple[Probe, ...]
    runs: tuple[Run, ...]
    proxy_s: float | None = None

    @property
    def others(self) -> float:
        """The cores that other work used in the worst probe or run: the mean of its repetitions."""
        same: dict[tuple[object, ...], list[float]] = {}
        for p in self.probes:
            same.setdefault(("probe", p.rows, p.burst), []).append(p.others)
        for r in self.runs:
            same.setdefault(("run", r.batching, r.clients), []).append(r.others)
        return max(statistics.fmean(each) for each in same.values())

    @property
    def quiet(self) -> bool:
        return self.others <= QUIET

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a stored measurement. Raises OSError, or ValueError for any other file."""
        try:
            return cls._of(json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no measurement of benchmarks.scaling: {error}") from None

    @classmethod
    def _of(cls, stored: dict[str, Any]) -> Self:
        probes = [
            Probe(**{**each, "latencies": tuple(each["latencies"])})
            for each in stored.pop("probes")
        ]
        runs = [Run(**each) for each in stored.pop("runs")]
        stored["preferred"] = tuple(stored["preferred"])
        return cls(**stored, probes=tuple(probes), runs=tuple(runs))
