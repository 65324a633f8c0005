"""The benchmark's structure and its choice. Times are checked in order of magnitude only."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from runtime.session.session import Session
from soa.records import as_record
from stages.reference.answers import filled_collections
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


def test_contestants_and_sizes(mlp: Built) -> None:
    sessions = {name: mlp.session(name) for name in mlp.files}
    threads = torch.get_num_threads()
    report = benchmark(mlp.signature, sessions, mlp.inputs, mlp.model, seconds=0.01)
    assert torch.get_num_threads() == threads
    assert [*report.timings] == [f"n={n}" for n in (1, 10, 100, 1000, 4099, 5000)]
    for rows in report.timings.values():
        assert set(rows) == {*sessions, EAGER, COPIES}
        for timing in rows.values():
            assert 0 < timing.p05_us <= timing.median_us <= timing.p95_us
            assert timing.rounds >= 3
    assert report.fastest in sessions
    assert as_record(BenchmarkReport, json.loads(json.dumps(report.to_dict()))) == report


def test_the_fastest_is_the_fastest() -> None:
    signature = mlp_signature(typical=(3, 50))
    sessions = {
        "ten times slower": Session(signature, rogues.Waits(0.02)),
        "fast": Session(signature, rogues.Waits(0.002)),
    }
    inputs = {"jets": values_of(signature.layouts["jets"], 100, 1)}
    report = benchmark(signature, sessions, inputs, seconds=0.01)
    assert report.fastest == "fast"
    assert set(report.timings["n=3"]) == set(sessions)
    slow, fast = (report.timings["n=50"][name].median_us for name in sessions)
    assert slow >= 20_000 > 2_000
    assert fast >= 2_000


class Slow(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x[:, :3]


def test_nobody_is_hopeless_beside_the_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_fastest_by_geometric_mean(medians: dict[str, tuple[float, ...]], fastest: str) -> None:
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


def test_what_noise_says_once_is_not_worth_a_second_artifact() -> None:
    steady, lucky = Timing(10.0, 9.0, 12.0, 7), Timing(8.0, 8.9, 30.0, 7)
    assert choose_by_rows([1], [{"a": steady, "b": lucky}], "a") == ("a", ())
    timings = {"n=1": {"a": Timing(10.2, 10.2, 10.2, 7), "b": Timing(10.0, 10.0, 10.0, 7)}}
    assert fastest_overall(timings, ["a", "b"]) == "a"
    assert fastest_overall(timings, ["b", "a"]) == "b"


def test_the_ladder_has_every_decade() -> None:
    assert ladder(mlp_signature(500)) == [{"n": n} for n in (1, 10, 100, 500)]
    assert ladder(mlp_signature(500, (32,))) == [{"n": n} for n in (1, 10, 32, 100, 500)]
    assert ladder(detector.signature()) == benchmark_cases(detector.signature())


def test_a_size_that_is_lost_is_said() -> None:
    def at(us: float) -> Timing:
        return Timing(us, us, us, 7)

    report = BenchmarkReport(
        {
            "n=1": {"a": at(2), "b": at(1), EAGER: at(20), COPIES: at(0.1)},
            "n=1000": {"a": at(10), "b": at(8), EAGER: at(20), COPIES: at(0.1)},
        },
        "a",
        below=((32, "b"),),
    )
    assert (report.engine_at(31), report.engine_at(32)) == ("b", "a")
    chosen, lost = report.lines()
    assert "20 at n=1" in chosen and "2 at n=1000" in chosen
    assert "n=1000" in lost and "8 µs" in lost and "10 µs" in lost and "b " in lost


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


def test_nobody_to_choose_from() -> None:
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

    found = race({"short": run}, 0.001)["short"]
    assert calls > 100 * found.rounds


def test_every_contestant_runs_in_every_round() -> None:
    calls = dict.fromkeys("ab", 0)

    def run(name: str) -> Any:
        def call() -> None:
            calls[name] += 1

        return call

    found = race({name: run(name) for name in calls}, 0.001)
    assert all(timing.rounds >= 7 for timing in found.values())
    assert min(calls.values()) > 7


def test_sizes() -> None:
    assert benchmark_cases(mlp_signature(500)) == [{"n": 1}, {"n": 500}]
    assert benchmark_cases(mlp_signature(500, (10, 20, 30))) == [{"n": 10}, {"n": 20}, {"n": 30}]
    assert benchmark_cases(mlp_signature(500, (), 500)) == [{"n": 500}]
    assert benchmark_cases(detector.signature()) == [{"n": 33, "m": 5}, {"n": 33, "m": 64}]


def test_the_row_major_baseline_computes_what_the_model_does() -> None:
    """If it did not, its time would mean nothing. The model uses every plan."""
    signature, model = detector.signature(), Detector().eval()
    inputs = {
        name: values_of(signature.layouts[name], signature.ranges[signature.rows_of[name]].max, 3)
        for name in signature.input_collections
    }
    case = {"n": 33, "m": 5}
    kept: list[dict[str, Any]] = []

    class Watching(torch.nn.Module):
        def forward(self, *arguments: torch.Tensor) -> Any:
            kept.append({"arguments": arguments, "result": model(*arguments)})
            return kept[-1]["result"]

    row_major_call(signature, Watching(), inputs, case)()
    given, _ = filled_collections(signature, inputs, case, torch.device("cpu"))
    from stages.reference.answers import row_major_inputs

    expected = row_major_inputs(signature, inputs, case)
    assert all(torch.equal(a, b) for a, b in zip(kept[0]["arguments"], expected, strict=True))
    assert all(a.is_contiguous() for a in kept[0]["arguments"])
    assert set(given) == set(signature.input_collections)
    row_major_call(signature, None, inputs, case)()
