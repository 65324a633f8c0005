"""What was measured, as it is stored in JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

QUIET = 0.05
"""Of one core: what other work may take while a run is for the record."""


@dataclass(frozen=True)
class Probe:
    """One client of a real server with requests of `rows`, `burst` of them at a time.

    Seconds are totals over all requests. `client_s`, `triton_s`, `stub_s`: on a core, of the
    client, of tritonserver and of its Python stub. `inside_s`: Triton's own compute durations.
    `latencies`: of a round, the quantiles 0.5 %, 1.5 % … 99.5 %. `others`: cores that
    the rest of the machine used.
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
    """What `clients` clients with one row a request saw together. Seconds."""

    batching: bool
    clients: int
    rate: float
    p50_s: float
    p99_s: float
    requests_a_run: float
    others: float


@dataclass(frozen=True)
class Measured:
    """Several probes of the same requests, and runs of the same clients, are repetitions.

    `max_rows`, `preferred`, `delay_us`: what the batching repository was deployed with. `proxy_s`:
    of a request through Envoy, on a core; None where no Envoy was there.
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
        """The most that other work took during any probe or run, over its repetitions."""
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
        """Raises OSError, or ValueError for a file that is none of ours."""
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
