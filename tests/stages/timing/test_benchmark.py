"""The benchmark's structure and its choice. Times are checked in order of magnitude only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.session.session import Session
from soa import Signature
from soa.records import as_record
from stages.reference import Case
from stages.reference.answers import filled_collections, row_major_inputs
from stages.reports import COPIES, EAGER, BenchmarkReport, Timing
from stages.timing.racing import (
    benchmark,
    benchmark_cases,
    benchmark_targets,
    choose_by_rows,
    fastest_overall,
    ladder,
    race,
    row_major_call,
)
from tests.models import detector, rogues
from tests.models.building import Built, mlp_signature
from tests.models.detector import Detector
from tests.soa.strategies import values_of


@pytest.fixture(scope="module")
def report(mlp: Built) -> BenchmarkReport:
    """A benchmark of every engine beside the eager model."""
    sessions = {name: mlp.session(name) for name in mlp.files}
    threads = torch.get_num_threads()
    report = benchmark(mlp.signature, sessions, mlp.inputs, mlp.model, seconds=0.01)
    assert torch.get_num_threads() == threads
    return report


def test_a_benchmark_has_every_contestant_at_every_size(
    mlp: Built, report: BenchmarkReport
) -> None:
    assert [*report.timings] == [f"n={n}" for n in (1, 10, 100, 1000, 4099, 5000)]
    for timings in report.timings.values():
        assert set(timings) == {*mlp.files, EAGER, COPIES}
    assert report.fastest in mlp.files


def test_a_timing_has_a_median_within_its_spread(report: BenchmarkReport) -> None:
    for timings in report.timings.values():
        for timing in timings.values():
            assert 0 < timing.p05_us <= timing.median_us <= timing.p95_us
            assert timing.rounds >= 3


def test_a_benchmark_survives_json(report: BenchmarkReport) -> None:
    assert as_record(BenchmarkReport, json.loads(json.dumps(report.to_dict()))) == report


def test_the_faster_of_two_sessions_is_chosen() -> None:
    signature = mlp_signature(typical=(3, 50))
    seconds = {"ten times slower": 0.02, "fast": 0.002}
    sessions = {name: Session(signature, rogues.Waits(s)) for name, s in seconds.items()}
    inputs = {"jets": values_of(signature.layouts["jets"], 100, 1)}
    report = benchmark(signature, sessions, inputs, seconds=0.01)
    assert report.fastest == "fast"
    assert set(report.timings["n=3"]) == set(sessions)
    for name, timing in report.timings["n=50"].items():
        assert timing.median_us >= seconds[name] * 1e6  # it waits at least so long


class Slow(torch.nn.Module):
    """Each call takes more than 20 ms."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x[:, :3]


def test_no_candidate_is_dropped_for_being_slower_than_the_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copies compute nothing, so every candidate takes more than twice as long."""
    monkeypatch.setattr("stages.timing.racing._LONG_S", 60.0)  # no round counts as long
    signature = mlp_signature(typical=(3,))
    inputs = {"jets": values_of(signature.layouts["jets"], 100, 1)}
    sessions = {"candidate": Session(signature, rogues.Waits(0.002))}
    report = benchmark(signature, sessions, inputs, Slow(), seconds=0.05)
    for rows in report.timings.values():
        assert rows["candidate"].rounds >= 7  # much slower ones are dropped after three


@pytest.mark.parametrize(
    ("medians", "fastest"),
    [
        ({"a": (1.0, 100.0), "b": (2.0, 40.0)}, "b"),  # geometric means 10 and 8.9
        ({"a": (1.0, 100.0), "b": (2.0, 60.0)}, "a"),  # 10 and 11; arithmetic: b
        ({"a": (5.0, 5.0)}, "a"),
    ],
)
def test_the_fastest_has_the_least_geometric_mean(
    medians: dict[str, tuple[float, ...]], fastest: str
) -> None:
    timings = {
        case: {name: Timing(values[i], values[i], values[i], 7) for name, values in medians.items()}
        for i, case in enumerate(["n=1", "n=1000"])
    }
    timings["n=1"][EAGER] = Timing(0.001, 0.001, 0.001, 7)  # not a candidate
    assert fastest_overall(timings, list(medians)) == fastest
    assert fastest_overall(timings, []) is None


@pytest.mark.parametrize(
    ("sizes", "medians", "chosen", "below"),
    [
        # b is worth it at the smallest size only; the switch lies between 1 and 100.
        ((1, 100), {"a": (10, 20), "b": (7, 90)}, "a", ((10, "b"),)),
        ((100, 1), {"a": (20, 10), "b": (90, 7)}, "a", ((10, "b"),)),
        ((1, 100), {"a": (10, 20), "b": (9.6, 90)}, "a", ()),  # saves less than a twentieth
        ((1, 100), {"a": (10, 20), "b": (90, 10)}, "b", ((10, "a"),)),
        ((0, 1, 2), {"a": (1, 1, 1), "b": (0.1, 9, 9)}, "a", ((1, "b"),)),
        ((1, 2), {"a": (1, 1), "b": (0.1, 9)}, "a", ((2, "b"),)),
        (
            (1, 16, 256),
            {"a": (10, 10, 10), "b": (1, 20, 20), "c": (20, 20, 1)},
            "c",
            ((4, "b"), (64, "a")),
        ),
        ((5,), {"a": (1,), "b": (2,)}, "a", ()),
    ],
)
def test_another_candidate_for_few_rows(
    sizes: tuple[int, ...],
    medians: dict[str, tuple[float, ...]],
    chosen: str,
    below: tuple[tuple[int, str], ...],
) -> None:
    by_size = [
        {name: Timing(times[i], times[i], times[i], 7) for name, times in medians.items()}
        for i in range(len(sizes))
    ]
    assert choose_by_rows(sizes, by_size, "a") == (chosen, below)


def test_a_gain_within_the_spread_is_not_worth_a_second_artifact() -> None:
    steady, lucky = Timing(10.0, 9.0, 12.0, 7), Timing(8.0, 8.9, 30.0, 7)
    assert choose_by_rows([1], [{"a": steady, "b": lucky}], "a") == ("a", ())


@pytest.mark.parametrize("first", ["a", "b"])
def test_of_two_that_are_about_as_fast_the_first_is_chosen(first: str) -> None:
    medians = {"a": 10.2, "b": 10.0}
    timings = {"n=1": {name: Timing(us, us, us, 7) for name, us in medians.items()}}
    second = "b" if first == "a" else "a"
    assert fastest_overall(timings, [first, second]) == first


@pytest.mark.parametrize(
    ("typical", "sizes"), [((), (1, 10, 100, 500)), ((32,), (1, 10, 32, 100, 500))]
)
def test_the_ladder_has_every_decade_and_typical_sizes(
    typical: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    assert ladder(mlp_signature(500, typical)) == [{"n": n} for n in sizes]


def test_the_ladder_of_several_dimensions_has_typical_sizes_only() -> None:
    assert ladder(detector.signature()) == benchmark_cases(detector.signature())


@pytest.fixture
def lost() -> BenchmarkReport:
    """a is chosen from 32 rows on, although b is faster at 1000 too."""

    def constant(us: float) -> Timing:
        return Timing(us, us, us, 7)

    return BenchmarkReport(
        {
            "n=1": {"a": constant(2), "b": constant(1), EAGER: constant(20), COPIES: constant(0.1)},
            "n=1000": {
                "a": constant(10), "b": constant(8), EAGER: constant(20), COPIES: constant(0.1),
            },
        },
        "a",
        below=((32, "b"),),
    )  # fmt: skip


def test_an_engine_for_few_rows_is_used_below_its_limit(lost: BenchmarkReport) -> None:
    assert (lost.engine_at(31), lost.engine_at(32)) == ("b", "a")


def test_the_lines_of_a_report_name_gains_and_sizes_that_are_lost(lost: BenchmarkReport) -> None:
    """The gains are those over eager: 20 times and twice."""
    gains, losses = lost.lines()
    assert "20 at n=1" in gains and "2 at n=1000" in gains
    assert "n=1000" in losses and "8 µs" in losses and "10 µs" in losses and "b " in losses


@pytest.fixture(scope="module")
def raced(mlp: Built) -> dict[str, BenchmarkReport]:
    """A race of two targets, which share the session `y`."""
    shared, own = mlp.session("exported"), mlp.session("exported")
    sessions = {"low": {"x": own, "y": shared}, "high": {"y": shared}}
    return benchmark_targets(mlp.signature, sessions, mlp.inputs, seconds=0.01)


def test_a_session_that_two_targets_share_is_timed_once(raced: dict[str, BenchmarkReport]) -> None:
    low, high = ([case["y"] for case in raced[name].timings.values()] for name in ("low", "high"))
    assert low == high


def test_each_target_has_its_own_contestants(raced: dict[str, BenchmarkReport]) -> None:
    assert {frozenset(case) for case in raced["low"].timings.values()} == {frozenset("xy")}
    assert raced["high"].fastest == "y"


def test_without_candidates_nothing_is_chosen() -> None:
    signature = mlp_signature(typical=(3,))
    inputs = {"jets": values_of(signature.layouts["jets"], 100, 1)}
    report = benchmark(signature, {}, inputs, rogues.Triple(), seconds=0.01)
    assert report.fastest is None
    assert set(report.timings["n=3"]) == {EAGER, COPIES}


@pytest.mark.parametrize("interrupted", [1, 2, 3, 4])
def test_a_call_that_is_interrupted_does_not_shorten_the_turns(interrupted: int) -> None:
    """As the system does, one of the first calls takes long. A turn then still has many calls."""
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        if calls == interrupted:
            time.sleep(0.05)

    timing = race({"short": run}, 0.001)["short"]
    assert calls > 100 * timing.rounds


def test_every_contestant_runs_in_every_round() -> None:
    calls = dict.fromkeys("ab", 0)

    def counting(name: str) -> Callable[[], None]:
        def call() -> None:
            calls[name] += 1

        return call

    timings = race({name: counting(name) for name in calls}, 0.001)
    assert all(timing.rounds >= 7 for timing in timings.values())
    assert min(calls.values()) > 7


@pytest.mark.parametrize(
    ("signature", "cases"),
    [
        (mlp_signature(500), [{"n": 1}, {"n": 500}]),
        (mlp_signature(500, (10, 20, 30)), [{"n": 10}, {"n": 20}, {"n": 30}]),
        (mlp_signature(500, (), 500), [{"n": 500}]),
        (detector.signature(), [{"n": 33, "m": 5}, {"n": 33, "m": 64}]),
    ],
    ids=["none typical", "typical", "one size", "two dimensions"],
)
def test_typical_sizes_are_timed_or_else_the_ends_of_the_range(
    signature: Signature, cases: list[Case]
) -> None:
    assert benchmark_cases(signature) == cases


class Watching(torch.nn.Module):
    """Passes its arguments to a model, and keeps them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.arguments: tuple[torch.Tensor, ...] = ()

    def forward(self, *arguments: torch.Tensor) -> Any:
        self.arguments = arguments
        return self.model(*arguments)


ALL_PLANS = detector.signature()
"""Its blocks use every plan by which memory becomes a tensor."""
CASE: Case = {"n": 33, "m": 5}
ALL_INPUTS = {
    name: values_of(ALL_PLANS.layouts[name], ALL_PLANS.ranges[ALL_PLANS.rows_of[name]].max, 3)
    for name in ALL_PLANS.input_collections
}


def test_the_row_major_baseline_calls_the_model_on_its_row_major_inputs() -> None:
    """If it did not, its time would mean nothing."""
    watching = Watching(Detector().eval())
    row_major_call(ALL_PLANS, watching, ALL_INPUTS, CASE)()
    expected = row_major_inputs(ALL_PLANS, ALL_INPUTS, CASE)
    for argument, values in zip(watching.arguments, expected, strict=True):
        assert torch.equal(argument, values) and argument.is_contiguous()


def test_the_copies_alone_run_without_a_model() -> None:
    row_major_call(ALL_PLANS, None, ALL_INPUTS, CASE)()  # it does not fail


def test_every_input_collection_is_filled_for_a_benchmark() -> None:
    filled, _ = filled_collections(ALL_PLANS, ALL_INPUTS, CASE, torch.device("cpu"))
    assert set(filled) == set(ALL_PLANS.input_collections)
