"""Does it pay that the rows of several requests share a run, and at which sizes?

The version's own benchmark says so. Whether they may is asked in stages/independence.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from registry.bundle import Manifest
from soa.text import microseconds

# What a call of the Python backend costs beside the artifact, and each further request in it, in
# microseconds: measured with benchmarks/serving.py and benchmarks/scaling.
_CALL_US = 300.0
_REQUEST_US = 100.0
_GOOD = 0.9  # of the best rows a second: as good, since benchmarks repeat no better


def preferred_sizes(manifest: Manifest, target: str) -> tuple[int, ...]:
    """The batch sizes at which the version's own benchmark served the most rows a second.

    From the times of the engines that a session of this target runs, with the server's cost of a
    call added. Empty where nothing was timed at 2 rows or more.
    """
    times = run_times(manifest, target)
    speeds = {rows: rows / (us + _CALL_US) for rows, us in times.items() if rows >= 2}
    best = max(speeds.values(), default=0.0)
    return tuple(sorted(rows for rows, speed in speeds.items() if speed >= _GOOD * best))


def why_merging_does_not_pay(manifest: Manifest, target: str) -> str | None:
    """For people; None where it may pay, or where 1 row, or more than 1, were not timed.

    Merging pays most for requests of one row. With c for a call, q for each further request in it
    and t(n) for the artifact, requests alone do 1 / (c + t(1)) rows a second, and n of them in a
    run n / (c + (n - 1) q + t(n)). A gain below a tenth is one that no benchmark shows.
    """
    times = run_times(manifest, target)
    if 1 not in times or len(times) < 2:
        return None
    alone = _CALL_US + times[1]
    gains = {
        n: n * alone / (_CALL_US + (n - 1) * _REQUEST_US + us) for n, us in times.items() if n >= 2
    }
    n = max(gains, key=gains.__getitem__)
    if _GOOD * gains[n] > 1:
        return None
    return (
        f"by its benchmark a row takes {microseconds(times[1])} alone and "
        f"{microseconds(times[n] / n)} among {n}, so that merged they would be {gains[n]:.2f} "
        "times as many a second (--merge does it all the same)"
    )


def run_times(manifest: Manifest, target: str) -> Mapping[int, float]:
    """Microseconds of a run by its rows, of the fastest engine that a session may take."""
    record = manifest.targets.get(target)  # a TensorRT plan is for a GPU that the version has not
    times: dict[int, float] = {}
    if record is None:
        return times
    for engine in record.engines():
        for rows, stats in record.candidates[engine].benchmark.items():
            if rows.isdecimal():
                times[int(rows)] = min(times.get(int(rows), stats.median_us), stats.median_us)
    return times
