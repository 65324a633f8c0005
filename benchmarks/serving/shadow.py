"""How much a second version slows production down: `python -m benchmarks.serving.shadow`.

One thread calls production as fast as possible: alone, with shadows that get the fractions 0, 0.01,
0.1 and 1 of the events, and with canaries that answer 5 % of the calls. All run the same model.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.subject import Subject, subject
from benchmarks.table import SPREAD, Cell, Panel, print_machine, print_panels
from registry.shadow_record import ShadowRecord
from runtime.session.session import Session
from runtime.versions.canary import CanaryLimits, CanarySession
from runtime.versions.second import Results
from runtime.versions.shadow import ShadowedSession

CAPTION = f"Time of a production call of a small MLP.\nx: to no shadow; {SPREAD} of the rounds."
CANARIES = {"canary": CanaryLimits(), "canary, p99": CanaryLimits(max_slowdown=1e9)}
FRACTIONS = (0.0, 0.01, 0.1, 1.0)
_ROUNDS = 15
_SECONDS = 0.3
_SHARE = 0.05


def main() -> None:
    torch.set_num_threads(1)
    print_machine()
    mlp = subject(features=6, highest=10_000)
    panel, notes = measure(mlp, mlp.session, (10, 1000, 10_000), _ROUNDS, _SECONDS)
    print_panels(CAPTION, [panel])
    print(*notes, sep="\n")


def measure(
    mlp: Subject,
    new_session: Callable[[], Session],
    sizes: Sequence[int],
    rounds: int,
    seconds: float,
) -> tuple[Panel, list[str]]:
    """Mean times of a call over `seconds`, taken in turns; and lines with the shadows' counts."""
    rows: dict[str, list[Cell]] = {}
    notes = []
    for n in sizes:
        ways = _ways(mlp, new_session, n)
        taken: dict[str, list[float]] = {name: [] for name in ways.calls}
        for _ in range(rounds):
            for name, call in ways.calls.items():
                taken[name].append(_mean_us(call, seconds))
                if name in ways.shadows:
                    ways.shadows[name].flush()  # its last events must not slow the next way
        base = float(np.median(taken["no shadow"]))
        for name, times in taken.items():
            low, middle, high = (float(v) for v in np.percentile(times, (5, 50, 95)))
            rows.setdefault(name, []).append(Cell(middle, low, high, middle / base))
        for name, records in ways.records.items():
            if records:
                compared = sum(record.events for record in records)
                dropped = sum(record.dropped for record in records)
                notes.append(f"{n:,} rows, {name}: {compared:,} compared, {dropped:,} dropped")
    panel = Panel(
        "one production thread", "rows", "µs", tuple(sizes),
        {name: tuple(cells) for name, cells in rows.items()},
    )  # fmt: skip
    return panel, notes


@dataclass(frozen=True)
class _Ways:
    """The calls of production by name; the shadows of some, and the records that these keep."""

    calls: dict[str, Callable[[], None]]
    shadows: dict[str, ShadowedSession]
    records: dict[str, list[ShadowRecord]]


def _ways(mlp: Subject, new_session: Callable[[], Session], n: int) -> _Ways:
    """All ways to call production on n rows."""
    plain = new_session()
    ways = _Ways({"no shadow": plain.bind(*mlp.collections(n))}, {}, {})
    for fraction in FRACTIONS:
        name = f"fraction {fraction:g}"
        ways.records[name] = []
        results = Results(_new_record(), ways.records[name].append)
        ways.shadows[name] = ShadowedSession(plain, new_session(), fraction, results)
        ways.calls[name] = ways.shadows[name].bind(*mlp.collections(n))
    for name, limits in CANARIES.items():
        results = Results(_new_record(), _forget)
        canary = CanarySession(plain, new_session(), _SHARE, limits, results)
        ways.calls[name] = canary.bind(*mlp.collections(n))
    ways.calls["canary, keys"] = _with_keys(ways.calls["canary"])
    return ways


def _new_record() -> ShadowRecord:
    """An empty record, of versions that no registry has."""
    digest = "0" * 64
    return ShadowRecord(
        version="mlp/2", digest=digest, production="mlp/1", production_digest=digest
    )


def _forget(record: ShadowRecord) -> None:
    """Keep no record."""


def _with_keys(binding: Callable[..., None]) -> Callable[[], None]:
    """A call of a canary, each with another key, by which it is drawn."""
    keys = itertools.count()
    return lambda: binding(key=next(keys))


def _mean_us(binding: Callable[[], None], seconds: float) -> float:
    """The mean time of a call in µs, over at least `seconds`. Each tenth call reads the clock."""
    calls, begun = 0, time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds:
        for _ in range(10):
            binding()
        calls += 10
    return passed / calls * 1e6


if __name__ == "__main__":
    main()
