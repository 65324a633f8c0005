"""How the autoscaling metric, the queue latency of an execution, depends on the load."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from benchmarks.scaling.autoscaler import Autoscaler, Decision, Scaling
from benchmarks.scaling.model import Load, Seen, Shape, System

_SECONDS = 2.0


@dataclass(frozen=True)
class Shown:
    """One server with `clients` that never pause. `busy`: its rate over the largest one."""

    clients: int
    busy: float
    metric_s: float
    p99_s: float


def shown(shape: Shape, clients: tuple[int, ...]) -> list[Shown]:
    found: list[tuple[int, Seen, float]] = []
    for count in clients:
        system = System(shape)
        seen = system.run(Load(count), _SECONDS, warm_s=_SECONDS / 2)
        counters = system.counters()
        found.append((count, seen, counters.queue_s / counters.runs))
    most = max(seen.rate for _, seen, _ in found)
    return [
        Shown(count, seen.rate / most, metric, seen.quantile(0.99)) for count, seen, metric in found
    ]


@dataclass(frozen=True)
class Scaled:
    """A wave of jobs with the autoscaler. `needed`: the servers that finish within `within_s`."""

    decisions: list[Decision]
    done_s: float
    needed: int
    within_s: float


def scaled_wave(shape: Shape, load: Load, rules: Scaling, needed: int, within_s: float) -> Scaled:
    """Simulate twice the time that the jobs may take; `done_s` is infinite if they are not done."""
    system = System(replace(shape, servers=rules.least))
    autoscaler = Autoscaler(system, rules)
    seen = system.run(load, 2 * within_s)
    done = seen.done_s if seen.answered == load.clients * load.requests else math.inf
    return Scaled(autoscaler.decisions, done, needed, within_s)


def settles_at(clients: int, service_s: float, threshold_s: float) -> float:
    """The number of servers at which the autoscaler stops growing, for clients that never pause.

    Requests wait `clients * service / servers` for each other, and the rule wants metric over
    threshold servers. Both are equal at the square root, which does not depend on the number that
    the load needs.
    """
    return math.sqrt(clients * service_s / threshold_s)
