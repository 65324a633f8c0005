"""Requests are merged if this pays according to the version's benchmark."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from registry.bundle.manifest import Below, BenchmarkStats, Candidate, Manifest, TargetRecord
from serving.triton.batch_sizes import preferred_sizes, why_merging_does_not_pay
from soa.records import as_record
from tests.models.bundles import V3, manifest_data


def manifest(chosen: dict[str, float], below: dict[str, float] | None = None) -> Manifest:
    """A manifest with median times (µs) by rows, of the chosen engine and of one for few rows."""

    def candidate(times: dict[str, float]) -> Candidate:
        stats = {n: BenchmarkStats(median_us=t, p05_us=t, p95_us=t) for n, t in times.items()}
        return Candidate(status="valid", files=["f"], benchmark=stats)

    candidates = {"aoti": candidate(chosen)}
    limits: list[Below] = []
    if below is not None:
        candidates["onnxruntime"] = candidate(below)
        limits = [Below(rows=50, engine="onnxruntime")]
    record = TargetRecord(status="verified", chosen="aoti", below=limits, candidates=candidates)
    bare = as_record(Manifest, {**manifest_data(), "targets": {}})
    return replace(bare, targets={V3: record})


@pytest.mark.parametrize(
    ("times", "sizes"),
    [
        ({"10": 10.0, "1000": 1000.0}, (1000,)),
        ({"1000": 10_000.0, "2000": 20_000.0}, (1000, 2000)),
        ({"100": 10_000.0, "1000": 900_000.0}, (100,)),
        ({"1": 3.0}, ()),
        ({"nodes=3,edges=5": 10.0}, ()),
        ({}, ()),
    ],
    ids=[
        "each call costs time of its own",
        "equally good",
        "slower beyond the cache",
        "one row",
        "several dimensions",
        "no time",
    ],
)
def test_preferred_sizes_come_from_the_benchmark(
    times: dict[str, float], sizes: tuple[int, ...]
) -> None:
    assert preferred_sizes(manifest(times), V3) == sizes


@given(st.dictionaries(st.integers(2, 5000), st.floats(0.1, 1e6), min_size=1, max_size=5))
def test_the_best_size_is_always_preferred(times: dict[int, float]) -> None:
    sizes = preferred_sizes(manifest({str(n): us for n, us in times.items()}), V3)
    best = max(times, key=lambda n: n / (CALL_US + times[n]))
    assert best in sizes
    assert set(sizes) <= set(times)
    assert list(sizes) == sorted(set(sizes))


CALL_US, ROW_US = 300, 100
"""What a run costs Triton beside the model, and each further request in it."""
PARTICLENET = {"1": 10_110.9, "32": 435_682.5}


def test_rows_that_cost_more_in_company_run_alone() -> None:
    """With the times of ParticleNet."""
    assert why_merging_does_not_pay(manifest(PARTICLENET), V3) == (
        "by its benchmark a row takes 10.1 ms alone and 13.6 ms among 32, so merging would "
        "give 0.76 times as many rows a second (--merge merges all the same)"
    )


@pytest.mark.parametrize(
    "times",
    [
        {"1": 192.7, "32": 3613.1, "1024": 106_851.2},  # Particle Transformer
        {"10": 169.7, "1000": 44_959.6},  # no time for 1 row
        {"10": 30_000.0, "1000": 3e6},
        {"1": 10_000.0},
        {"nodes=3,edges=5": 10.0},
        {},
        {"1": 10_000.0, "8": 20_000.0, "32": 900_000.0},  # one size that pays is enough
    ],
)
def test_requests_that_may_gain_are_merged(times: dict[str, float]) -> None:
    assert why_merging_does_not_pay(manifest(times), V3) is None


def test_the_engine_for_few_rows_decides_too() -> None:
    times = {"1": 10_000.0, "32": 200_000.0}
    assert why_merging_does_not_pay(manifest(times), V3) is None
    reason = why_merging_does_not_pay(manifest(times, {"1": 5000.0}), V3)
    assert reason is not None
    assert "takes 5 ms alone and 6.25 ms among 32" in reason


@given(
    st.floats(0.0, 1e5), st.floats(1.0, 1e5),
    st.lists(st.integers(2, 5000), min_size=1, max_size=4, unique=True),
)  # fmt: skip
def test_requests_run_alone_only_where_no_size_serves_more(
    once: float, row: float, sizes: list[int]
) -> None:
    """Run times are a constant part and one proportional to the rows."""
    times = {n: once + row * n for n in (1, *sizes)}
    reason = why_merging_does_not_pay(manifest({str(n): us for n, us in times.items()}), V3)
    alone = 1 / (CALL_US + times[1])  # rows in a microsecond
    merged = max(n / (CALL_US + ROW_US * (n - 1) + times[n]) for n in sizes)
    gain = 0.9 * merged / alone  # benchmarks have noise
    assume(abs(gain - 1) > 1e-9)  # at the limit itself rounding decides
    assert (reason is None) == (gain > 1)
    if once >= 2000 + 3 * row and max(sizes) >= 20:  # most of the time is constant
        assert reason is None
