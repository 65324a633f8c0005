"""The simulation against the measurement of the same runs."""

from __future__ import annotations

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
        """Predicted to measured: requests a second, p50, p99."""
        run, seen = self.measured, self.predicted
        return (
            seen.rate / run.rate,
            seen.quantile(0.5) / run.p50_s,
            seen.quantile(0.99) / run.p99_s,
        )


def batching_of(measured: Measured) -> Batching:
    return Batching(measured.max_rows, measured.preferred, measured.delay_us / 1e6)


def check(measured: Measured, costs: Costs) -> list[Compared]:
    """Clients and server share the cores, as they did in the measurement."""
    found = []
    for run in measured.runs:
        batching = batching_of(measured) if run.batching else Batching()
        shape = Shape(costs, batching, cores=measured.cores, shared=True)
        found.append(Compared(run, simulate(shape, Load(run.clients), _SECONDS, _WARM_S)))
    return found
