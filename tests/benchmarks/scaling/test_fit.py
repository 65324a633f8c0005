"""The fit finds the costs from which probes were made, and the file keeps the measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scaling.check import check, typical
from benchmarks.scaling.costs import Costs
from benchmarks.scaling.fit import fit, misfit, pooled
from benchmarks.scaling.records import Measured, Probe, Run

TRUE = Costs(
    client=4e-4, client_row=2e-6, client_wake=1e-4, request=8e-5, request_row=1e-6, inside=1e-4,
    reply=3e-5, behind=9e-5, run=3e-4, run_request=1.5e-4, run_row=2e-5,
)  # fmt: skip


def probe(rows: int, burst: int, requests_a_run: int) -> Probe:
    """A probe of a thousand runs that take the times of TRUE."""
    runs, requests = 1000, 1000 * requests_a_run
    stub = runs * TRUE.of_run(requests_a_run, rows * requests_a_run) - runs * TRUE.inside
    beside = runs * (TRUE.inside + TRUE.reply + TRUE.behind)
    waited = (
        TRUE.client_wake
        + TRUE.of_client(rows)
        + TRUE.of_request(rows)
        + TRUE.of_run(1, rows)
        + TRUE.reply
    )  # the latency of a request alone
    return Probe(
        rows=rows, burst=burst, requests=requests, runs=runs,
        client_s=requests * TRUE.of_client(rows) + runs * TRUE.client_wake,
        triton_s=requests * TRUE.of_request(rows) + beside, stub_s=stub,
        inside_s=stub + runs * TRUE.inside, latencies=(waited,) * 100, others=0.0,
    )  # fmt: skip


PROBES = (probe(1, 1, 1), probe(50, 1, 1), probe(200, 1, 1), probe(1, 4, 2), probe(1, 16, 4))


def test_costs_come_back_out_of_probes() -> None:
    found = fit(PROBES)
    for name, value in vars(TRUE).items():
        if not name.startswith("extras"):
            assert vars(found)[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name
    assert found.extras == pytest.approx((0.0,) * 100)
    assert misfit(PROBES, found) < 1e-6


def test_repeated_probes_count_together() -> None:
    quick = Probe(**{**vars(PROBES[0]), "latencies": (1e-3,) * 100, "others": 0.2})
    one, other = pooled([PROBES[0], PROBES[1], quick])[:2]
    assert (one.requests, one.runs, one.others) == (2000, 2000, 0.2)
    assert one.stub_s == pytest.approx(2 * PROBES[0].stub_s)
    assert one.latencies == tuple(sorted((*PROBES[0].latencies, *quick.latencies)))
    assert other == PROBES[1]
    same, once = fit([*PROBES, *PROBES]), fit(PROBES)
    assert same.run_request == pytest.approx(once.run_request)


def test_time_that_nothing_worked_in_is_waited() -> None:
    slow = [
        Probe(**{**vars(each), "latencies": tuple(s + 1e-3 for s in each.latencies)})
        for each in PROBES
    ]
    found = fit(slow)
    assert found.behind == 0
    assert found.wait == pytest.approx(1e-3 - TRUE.behind)


def test_what_latencies_differ_by_is_added_to_the_work() -> None:
    uneven = tuple(1e-3 + i * 1e-5 for i in range(100))
    found = fit([Probe(**{**vars(PROBES[0]), "latencies": uneven}), *PROBES[1:]])
    assert found.extras_every == pytest.approx(1e-3 + 49.5e-5)
    assert sum(found.extras) == pytest.approx(0)
    assert max(found.extras) == pytest.approx(49.5e-5)


def test_no_cost_is_negative() -> None:
    found = fit([probe(1, 1, 1), Probe(**{**vars(probe(50, 1, 1)), "client_s": 0.1})])
    assert all(value >= 0 for name, value in vars(found).items() if name != "extras")


def test_the_probe_of_single_rows_is_needed() -> None:
    with pytest.raises(ValueError, match="one row a request"):
        fit(PROBES[1:])


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"probes": [{"rows": 1}]}'])
def test_a_file_that_is_none_of_ours_is_said_in_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no measurement"):
        Measured.load(tmp_path / "other.json")


def test_what_was_measured_is_kept_and_checked(tmp_path: Path) -> None:
    runs = (Run(True, 1, 870.0, 1.15e-3, 1.2e-3, 1.0, 0.02), Run(False, 8, 1, 1, 1, 1, 0.3))
    measured = Measured("jets/3", "2026-01-31", {"cpu": "any"}, 4096, (1000,), 50, PROBES, runs)
    measured.save(tmp_path / "measured.json")
    assert Measured.load(tmp_path / "measured.json") == measured
    assert (measured.others, measured.quiet) == (0.3, False)
    alone, many = check(measured, fit(PROBES))
    assert alone.ratios() == pytest.approx((1, 1, 1), rel=0.1)
    assert many.predicted.rate > 1.3 * alone.predicted.rate


def test_repetitions_count_by_their_median() -> None:
    runs = [Run(True, 8, rate, 1.0, rate, 2.0, rate) for rate in (3.0, 1.0, 9.0)]
    other = Run(False, 8, 5.0, 1.0, 1.0, 1.0, 0.0)
    assert typical([*runs, other]) == [Run(True, 8, 3.0, 1.0, 3.0, 2.0, 9.0), other]
