"""Decide from the version's benchmark whether joined requests are faster, and at which row counts.

stages/capture/independence.py decides whether rows of several requests may share a run at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from registry.bundle import Manifest
from soa.text import microseconds

# The time of a call of the Python backend without the artifact, and of each further request in it,
# in microseconds; measured with benchmarks/serving/triton.py.
_CALL_US = 300.0
_REQUEST_US = 100.0
_NOISE = 0.9  # a rate of at least this part of another is as good: benchmarks have noise


def preferred_sizes(manifest: Manifest, target: str) -> tuple[int, ...]:
    """Return the batch sizes with the most rows per second, by the version's benchmark, ascending.

    The time of a batch is that of the engines that a session of this target runs, plus the server's
    time for a call. Empty if no size of at least 2 rows was timed.
    """
    times = run_times(manifest, target)
    rates = {rows: rows / (us + _CALL_US) for rows, us in times.items() if rows >= 2}
    best = max(rates.values(), default=0.0)
    return tuple(sorted(rows for rows, rate in rates.items() if rate >= _NOISE * best))


def why_merging_does_not_pay(manifest: Manifest, target: str) -> str | None:
    """Return a sentence with the reason; None if merging may be faster, or if times are missing.

    Merging helps most for requests of one row. Let c be the time of a call, q that of each further
    request in it, and t(n) the time of the artifact for n rows. Single requests give
    1 / (c + t(1)) rows in a second; n of them in one run give n / (c + (n - 1) q + t(n)). A gain of
    less than about a tenth is within the noise of a benchmark.
    """
    times = run_times(manifest, target)
    if 1 not in times or len(times) < 2:
        return None
    alone_us = _CALL_US + times[1]
    gains = {
        n: n * alone_us / (_CALL_US + (n - 1) * _REQUEST_US + us)
        for n, us in times.items()
        if n >= 2
    }
    n = max(gains, key=gains.__getitem__)  # the row count with the largest gain
    if _NOISE * gains[n] > 1:
        return None
    return (
        f"by its benchmark a row takes {microseconds(times[1])} alone and "
        f"{microseconds(times[n] / n)} among {n}, so merging would give {gains[n]:.2f} "
        "times as many rows a second (--merge merges all the same)"
    )


def run_times(manifest: Manifest, target: str) -> Mapping[int, float]:
    """Return the median times of runs in microseconds, by row count.

    At each row count it is the time of the fastest engine that a session of the target runs.
    """
    record = manifest.targets[target]
    times: dict[int, float] = {}
    for engine in record.engines():
        for rows, stats in record.candidates[engine].benchmark.items():
            if rows.isdecimal():  # others are of several dimensions: `nodes=5,edges=20`
                times[int(rows)] = min(times.get(int(rows), stats.median_us), stats.median_us)
    return times
