"""Compare the simulation with the measurement of the same runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.scaling.batcher import Batching
from benchmarks.scaling.costs import Costs
from benchmarks.scaling.model import Load, Seen, Shape, simulate
from benchmarks.scaling.records import Measured, Run

GOAL = 0.2
_SECONDS = 3.0
_WARM_S = 0.5


@dataclass(frozen=True)
class Compared:
    measured: Run
    predicted: Seen

    def ratios(self) -> tuple[float, float, float]:
        """Predicted value over measured value: requests per second, p50, p99."""
        run, seen = self.measured, self.predicted
        return (
            seen.rate / run.rate,
            seen.quantile(0.5) / run.p50_s,
            seen.quantile(0.99) / run.p99_s,
        )


def typical(runs: Iterable[Run]) -> list[Run]:
    """Join the repetitions of each run: the median of each number, the maximum of `others`."""
    same: dict[tuple[bool, int], list[Run]] = {}
    for run in runs:
        same.setdefault((run.batching, run.clients), []).append(run)
    return [_median(of) for of in same.values()]


def _median(runs: Sequence[Run]) -> Run:
    def middle(name: str) -> float:
        return float(statistics.median(getattr(run, name) for run in runs))

    return Run(
        batching=runs[0].batching, clients=runs[0].clients, rate=middle("rate"),
        p50_s=middle("p50_s"), p99_s=middle("p99_s"), requests_a_run=middle("requests_a_run"),
        others=max(run.others for run in runs),
    )  # fmt: skip


def batching_of(measured: Measured) -> Batching:
    return Batching(measured.max_rows, measured.preferred, measured.delay_us / 1e6)


def check(measured: Measured, costs: Costs) -> list[Compared]:
    """Simulate the runs as they were measured: clients on one core, the server on another."""
    found = []
    for run in typical(measured.runs):
        batching = batching_of(measured) if run.batching else Batching()
        shape = Shape(costs, batching, client_cores=1)
        found.append(Compared(run, simulate(shape, Load(run.clients), _SECONDS, _WARM_S)))
    return found
