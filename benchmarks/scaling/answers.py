"""The predictions of the model, with the costs of one measurement."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.scaling.autoscaler import Scaling
from benchmarks.scaling.check import Compared, batching_of, check
from benchmarks.scaling.costs import Costs
from benchmarks.scaling.fit import fit, misfit
from benchmarks.scaling.metric import Scaled, Shown, scaled_wave, shown
from benchmarks.scaling.model import Load, Seen, Shape
from benchmarks.scaling.records import Measured
from benchmarks.scaling.sizing import Sized, capacity, closed, opened, share, wave
from benchmarks.scaling.theory import wait_one_server

ROWS = (1, 50, 500)
"""The rows of a request: an event with one object, 50 such events, 50 events with ten objects."""
THINK_S = (1.0, 10.0)
CLIENTS = (1_000, 10_000, 100_000)
WHOLE = (1, 4, 8)
SHOWN = (1, 8, 32, 128, 512)
# One of the predicted loads: 1000 jobs in batches of 50 every ten minutes.
JOBS, BATCH, EVERY_S = 1000, 50, 600.0
BATCHES = 200  # of a job: 10,000 events
EVENT_S = 0.2  # of a job's own work on an event
LOADS = (0.5, 0.8, 0.9, 0.95, 0.99)
PROXY_S = 60e-6
"""The proxy's time for a request if no Envoy was measured: a guess."""


@dataclass(frozen=True)
class Wave:
    """1000 jobs that start at once and must be done before the next thousand start."""

    rows: int
    servers: int
    done_s: float
    rate: float


@dataclass(frozen=True)
class Answers:
    """All predictions.

    `capacity`: by batching and rows. `wholes`: by the number of servers, the rate of each and the
    p99 in seconds, if each gets the share of one server; 0: one server with closed clients.
    `proxy`: by the load of its thread, requests per second and the mean wait in seconds.
    """

    measured: Measured
    costs: Costs
    misfit: float
    checked: list[Compared]
    capacity: dict[tuple[bool, int], Seen]
    sizes: list[Sized]
    ramp: list[Sized]
    waves: list[Wave]
    wholes: dict[int, tuple[float, float]]
    shown: dict[bool, list[Shown]]
    scaled: Scaled
    proxy_s: float
    proxy: dict[float, tuple[float, float]]


def answer(measured: Measured, say: Callable[[str], None] = print) -> Answers:
    costs = fit(measured.probes)
    on = Shape(costs, batching_of(measured))
    off = Shape(costs)
    say("the check")
    checked = check(measured, costs)
    say("servers for a load")
    capacities = {(b, n): capacity(s, n) for b, s in ((True, on), (False, off)) for n in ROWS}
    mine = {rows: share(on, rows) for rows in ROWS}
    sizes = [Sized(clients, 1, think, mine[1]) for think in THINK_S for clients in CLIENTS]
    ramp = [Sized(JOBS, rows, BATCH * EVENT_S, mine[rows]) for rows in ROWS[1:]]
    waves = [_wave(on, rows) for rows in ROWS[1:]]
    wholes = {n: opened(replace(on, servers=n), 1, mine[1]) for n in WHOLE}
    wholes[0] = closed(on, 1, mine[1], 1.0)
    say("the autoscaler")
    jobs = Load(JOBS, ROWS[-1], requests=BATCHES)
    proxy_s = measured.proxy_s or PROXY_S
    return Answers(
        measured=measured,
        costs=costs,
        misfit=misfit(measured.probes, costs),
        checked=checked,
        capacity=capacities,
        sizes=sizes,
        ramp=ramp,
        waves=waves,
        wholes={n: (seen.rate / max(1, n), seen.quantile(0.99)) for n, seen in wholes.items()},
        shown={True: shown(on, SHOWN), False: shown(off, SHOWN)},
        scaled=scaled_wave(on, jobs, Scaling(), waves[-1].servers, EVERY_S),
        proxy_s=proxy_s,
        proxy={load: (load / proxy_s, wait_one_server(load / proxy_s, proxy_s)) for load in LOADS},
    )


def _wave(shape: Shape, rows: int) -> Wave:
    servers, done_s = wave(shape, JOBS, rows, BATCHES, EVERY_S)
    return Wave(rows, servers, done_s, JOBS * BATCHES / EVERY_S)


def proxy_threads(rate: float, proxy_s: float) -> int:
    """The smallest number of threads that are busy at most four fifths of the time."""
    return math.ceil(rate * proxy_s / 0.8)
