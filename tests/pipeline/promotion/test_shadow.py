"""A shadow: a second version that runs production's events without delaying it, and its gate."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeline
from pipeline.promotion.promoting import promote
from registry.bundle.bundle import Bundle
from registry.errors import NotFoundError, RegistryError
from registry.promotion import Decision, PromotionRefused
from registry.shadow_record import ShadowRecord
from registry.store.registry import Registry
from runtime.errors import LoadError
from runtime.session.session import Session
from runtime.versions.shadow import ShadowedSession
from tests.models import mlps
from tests.models.forked import in_a_child
from tests.models.project import PASSED, answer, cli, resealed
from tests.models.rogues import Calls
from tests.pipeline.promotion.conftest import Gated, beside, event, read, record_of, regated

N = 37
TOGETHER = {"shadow": {"min_events": 20, "max_abs": 1e-3}, "metrics": None, "max_slowdown": 1000}


@pytest.fixture
def registry(rivals: Registry) -> Registry:
    """jets/1 is in production, and jets/2, another model, in staging."""
    return rivals


def shadowed(registry: Registry, **options: Any) -> ShadowedSession:
    """A session of production, whose events all run in what is in staging too."""
    defaults: dict[str, Any] = {"shadow": "@staging", "shadow_fraction": 1.0}
    return beside(ShadowedSession, registry, **(defaults | options))


def run_events(session: Session, count: int, n: int = N) -> float:
    """Runs events of different rows; returns the two models' largest difference on them."""
    largest = 0.0
    jets, tags, features = event(session, 2 * n)
    binding = session.bind(jets, tags)
    with torch.no_grad():
        answers, other_answers = (mlps.PointwiseFirst(seed)(features) for seed in (1, 2))
    for i in range(count):
        rows = 1 + (i * 7) % (2 * n)
        binding(rows)
        torch.testing.assert_close(read(tags)[:rows], answers[:rows], atol=1e-5, rtol=1e-4)
        largest = max(largest, float((answers - other_answers)[:rows].abs().max()))
        if isinstance(session, ShadowedSession) and i % 4 == 3:
            session.flush()  # so that no event is dropped
    return largest


def test_a_planted_difference_is_caught(registry: Registry) -> None:
    session = shadowed(registry)
    expected = run_events(session, 40)
    session.close()
    record = record_of(registry)
    assert (record.version, record.production) == ("jets/2", "jets/1")
    assert (record.events, record.dropped, record.errors) == (40, 0, 0)
    assert record.max_abs["probabilities"] == pytest.approx(expected, rel=1e-3)
    assert record.max_rel["probabilities"] > 0.1
    shown = cli("show", "jets/2", "--registry", registry.uri).stdout
    assert "40 events beside jets/1, 0 errors, 0 dropped" in shown


def test_the_events_of_sessions_are_added(registry: Registry) -> None:
    for _ in range(2):
        session = shadowed(registry)
        run_events(session, 8)
        session.close()
    assert record_of(registry).events == 16


def test_a_fraction_of_the_events_runs_in_the_shadow(registry: Registry) -> None:
    session = shadowed(registry, shadow_fraction=0.1)
    jets, tags, _ = event(session, N)
    binding = session.bind(jets, tags)
    for _ in range(2000):
        binding()
    session.close()
    record = record_of(registry)
    # 200 are expected, with a standard deviation of 13.
    assert 120 < record.events + record.dropped < 290


def test_a_shadow_of_no_events_has_no_record(registry: Registry) -> None:
    session = shadowed(registry, shadow_fraction=0)
    run_events(session, 100)
    session.close()
    assert registry.find("jets/2").shadows == {}


def test_the_events_of_run_and_run_many_count(registry: Registry) -> None:
    session = shadowed(registry)
    events = [event(session, n, seed=n) for n in (5, 9, 33)]
    bindings = [session.bind(jets, tags) for jets, tags, _ in events]
    bindings[2](4)  # 4 rows for this call only
    session.run_many(bindings, threads=2)
    assert [binding.rows["n"] for binding in bindings] == [5, 9, 33]
    for _, tags, features in events:
        torch.testing.assert_close(read(tags), mlps.PointwiseFirst(1)(features).detach())
    session.run(*event(session, 3)[:2])
    session.close()
    assert record_of(registry).events == 5


def test_a_full_queue_drops_and_counts(registry: Registry) -> None:
    """The shadow waits within an event, and production continues."""
    session = shadowed(registry)
    jets, tags, _ = event(session, N)
    binding = session.bind(jets, tags)
    may_continue = threading.Event()
    execute = session._worker._shadow._executable

    def wait_then_execute(arguments: Any) -> None:
        may_continue.wait()  # in the shadow's thread
        execute(arguments)

    session._worker._shadow._executable = Calls(wait_then_execute)
    for _ in range(100):
        binding()
    assert session.seen.dropped >= 90
    may_continue.set()
    session.close()
    record = record_of(registry)
    assert record.events + record.dropped == 100
    assert record.errors == 0


SLOW_S = 0.02  # an event of a slow shadow


def slowed(session: ShadowedSession) -> list[tuple[float, float]]:
    """Makes the shadow slow; the list gets when each of its events began and ended."""
    execute = session._worker._shadow._executable
    times: list[tuple[float, float]] = []

    def execute_slowly(arguments: Any) -> None:
        begin = time.perf_counter()
        time.sleep(SLOW_S)
        execute(arguments)
        times.append((begin, time.perf_counter()))

    session._worker._shadow._executable = Calls(execute_slowly)
    return times


def run_for(session: ShadowedSession, seconds: float) -> tuple[int, float]:
    """Runs events for a time; returns their number, and the seconds that it took."""
    binding = session.bind(*event(session, N)[:2])
    calls, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        binding()
        calls += 1
    return calls, passed


def test_it_works_for_no_more_than_its_fraction_of_the_time(registry: Registry) -> None:
    """A slow shadow drops and counts events."""
    session = shadowed(registry, shadow_fraction=0.1)
    slowed(session)
    calls, passed = run_for(session, 0.5)
    seen = session.seen
    assert seen.events * SLOW_S < 0.1 * passed
    assert seen.events + seen.dropped > 0.05 * calls  # about a tenth was drawn
    session.close()


def test_a_flush_does_not_rest_between_events(registry: Registry) -> None:
    """Otherwise a slow shadow rests 0.4 s after each event."""
    session = shadowed(registry, shadow_fraction=0.1)
    times = slowed(session)
    run_for(session, 0.5)
    seen, before = session.seen, len(times)
    session.flush()
    flushed = times[before:]
    rests = [begin - end for (_, end), (begin, _) in pairwise(flushed)]
    assert min(rests) < 0.2
    assert seen.events < record_of(registry).events <= seen.events + 9
    session.close()


def test_the_shadow_sees_the_event_as_it_was_at_the_call(registry: Registry) -> None:
    """Writing to the memory right after the call changes nothing."""
    registry.promote(registry.find("jets/1"), "staging", PASSED)
    session = shadowed(registry)
    jets, tags, _ = event(session, N)
    binding = session.bind(jets, tags)
    for i in range(200):
        for name in "abcdef":
            jets[name][:] = i
        binding()
        for name in "abcdef":
            jets[name][:] = float("nan")
        for name in "xyz":
            tags[name][:] = float("nan")
    session.close()
    record = record_of(registry, "jets/1")
    assert record.events > 0
    assert record.max_abs == {"probabilities": 0.0}


def test_an_error_of_the_shadow_is_counted_and_never_raised(registry: Registry) -> None:
    session = shadowed(registry)

    def fails(arguments: object) -> None:
        raise RuntimeError("out of luck")

    session._worker._shadow._executable = Calls(fails)
    expected = run_events(session, 8)
    assert expected > 0
    session.close()
    record = record_of(registry)
    assert (record.events, record.errors) == (0, 8)
    assert record.error == "RuntimeError: out of luck"


def test_nan_on_one_side_is_an_infinite_difference(registry: Registry) -> None:
    session = shadowed(registry)
    jets, tags, _ = event(session, N)
    jets["a"][3] = float("nan")  # both give NaN
    binding = session.bind(jets, tags)
    binding()
    session.flush()
    assert record_of(registry).max_abs["probabilities"] < 1.1
    binding.inner.outputs["tags"]["x"][5] = float("nan")  # now only production gives NaN
    session.offer(binding.inner)
    session.close()
    assert record_of(registry).max_abs["probabilities"] == float("inf")


def test_a_record_in_a_file_is_not_in_the_registry(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "seen.json"
    session = shadowed(registry, shadow_record=file)
    run_events(session, 25)
    session.close()
    assert ShadowRecord.from_json(file.read_text(), "file").events == 25
    assert registry.find("jets/2").shadows == {}


def test_a_file_that_is_there_is_not_replaced_by_a_record(
    registry: Registry, tmp_path: Path
) -> None:
    file = tmp_path / "seen.json"
    file.write_text("mine")
    with pytest.raises(LoadError, match="is there already: name a new file"):
        shadowed(registry, shadow_record=file)
    assert file.read_text() == "mine"


def test_a_file_for_a_record_that_cannot_be_written_is_refused(
    registry: Registry, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=r"none.seen\.json cannot be written: No such file"):
        shadowed(registry, shadow_record=tmp_path / "none" / "seen.json")


@dataclass(frozen=True)
class Candidate:
    """`ref` is in staging beside jets/1 in production; both ask for the gate of a shadow."""

    registry: Registry
    ref: str

    def gate(self, **options: Any) -> dict[str, Decision]:
        """The decisions on it as a shadow, by what they are about."""
        return shadow_gate(self.registry, self.ref, **options)

    def shadow(self, count: int, **options: Any) -> None:
        """Runs this many events in it."""
        session = shadowed(self.registry, **options)
        run_events(session, count)
        session.close()


def shadow_gate(registry: Registry, ref: str, **options: Any) -> dict[str, Decision]:
    """The decisions on a version as a shadow, by what they are about."""
    assessment = promote(registry, ref, "production", dry_run=True, **options)
    decisions = [decision for decision in assessment.decisions if decision.gate == "shadow"]
    return {decision.detail.partition(" is ")[0]: decision for decision in decisions}


@pytest.fixture
def first(empty: Registry, gated: Gated, tmp_path: Path, measured_once: None) -> Registry:
    """jets/1, which asks for the gate of a shadow; it is not promoted."""
    empty.register(regated(gated.good, tmp_path / "first", TOGETHER))
    return empty


@pytest.fixture
def production(first: Registry) -> Registry:
    """The registry with jets/1 in production."""
    first.promote(first.find("jets/1"), "production", PASSED)
    return first


def staged(registry: Registry, bundle: Bundle, folder: Path) -> Candidate:
    """The bundle in staging beside production."""
    version = registry.register(regated(bundle, folder, TOGETHER))
    registry.promote(version, "staging", PASSED)
    return Candidate(registry, version.ref)


@pytest.fixture
def same(production: Registry, gated: Gated, tmp_path: Path) -> Candidate:
    """A candidate with the answers of production."""
    return staged(production, gated.good, tmp_path / "same")


@pytest.fixture
def other(production: Registry, gated: Gated, tmp_path: Path) -> Candidate:
    """A candidate with other answers, which ran 25 events."""
    candidate = staged(production, gated.bad, tmp_path / "other")
    candidate.shadow(25)
    return candidate


EVENTS = "events compared beside jets/1"


def test_the_gate_asks_nothing_if_nothing_is_in_production(first: Registry) -> None:
    assert shadow_gate(first, "jets/1") == {}


def test_too_few_events_do_not_pass_the_gate(same: Candidate) -> None:
    few = same.gate()[EVENTS]
    assert (few.passed, few.found, few.limit) == (False, "0", ">= 20")


def test_a_shadow_that_agrees_passes_the_gate_beside_one_that_does_not(
    other: Candidate, same: Candidate
) -> None:
    same.shadow(25)
    decisions = same.gate()
    assert decisions and all(decision.passed for decision in decisions.values())


def test_the_gate_is_for_production_only(same: Candidate) -> None:
    promote(same.registry, same.ref, "staging")  # it is not refused


def test_a_shadow_that_differs_does_not_pass_the_gate(other: Candidate) -> None:
    decisions = other.gate()
    assert decisions[EVENTS].passed
    assert decisions["errors beside jets/1"].passed
    (gap,) = [d for about, d in decisions.items() if about.startswith("largest absolute diff")]
    assert (gap.passed, gap.limit) == (False, "<= 0.001")
    with pytest.raises(PromotionRefused, match="shadow: largest absolute difference of prob"):
        promote(other.registry, other.ref, "production")


@pytest.fixture
def file(same: Candidate, tmp_path: Path) -> Path:
    """The record of 21 events of `same`, from a production that may not write to the registry."""
    same.shadow(21, shadow_record=tmp_path / "seen.json")
    return tmp_path / "seen.json"


def test_a_record_in_a_file_counts_if_the_gate_gets_it(same: Candidate, file: Path) -> None:
    assert not same.gate()[EVENTS].passed
    decisions = same.gate(shadows=[file])
    assert decisions[EVENTS].found == "21"
    assert all(decision.passed for decision in decisions.values())


def test_a_record_in_a_file_is_an_option_of_the_command(same: Candidate, file: Path) -> None:
    options = ("--to", "production", "--dry-run", "--shadow", file)
    assert answer("promote", same.ref, *options, registry=same.registry)["would_promote"]


def test_a_record_of_another_version_is_refused(
    same: Candidate, file: Path, gated: Gated, tmp_path: Path
) -> None:
    later = staged(same.registry, gated.good, tmp_path / "later")
    message = rf"{same.ref} ran beside jets/1; .* record of {later.ref} "
    with pytest.raises(RegistryError, match=message):
        later.gate(shadows=[file])


def test_an_output_that_was_not_compared_does_not_pass_the_gate(
    same: Candidate, file: Path
) -> None:
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"max_abs": {}}))
    decisions = same.gate(shadows=[file])
    (missing,) = [d for about, d in decisions.items() if about.startswith("largest")]
    assert not missing.passed


def test_a_file_that_is_no_record_is_refused(same: Candidate, tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(RegistryError, match=r"no\.json: not the record of a shadow"):
        same.gate(shadows=[tmp_path / "no.json"])


def test_another_signature_is_refused(registry: Registry, gated: Gated, tmp_path: Path) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["signature"]["rows"]["n"]["max"] += 24

    registry.register(resealed(gated.bad, tmp_path / "wider", edit))
    with pytest.raises(
        LoadError, match="jets/3 has another signature than jets/1: `pipeline show jets/1 jets/3`"
    ):
        shadowed(registry, shadow="jets/3")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"live": True}, "beside one version on one device"),
        ({"device": "auto"}, "beside one version on one device"),
        ({"shadow_fraction": 1.5}, "shadow_fraction=1.5: a number from 0 to 1"),
        ({"shadow_fraction": float("nan")}, "shadow_fraction=nan"),
        ({"lookup": "offline"}, "not known here|write shadow_record=FILE"),
    ],
)
def test_sessions_and_options_without_a_shadow_are_refused(
    registry: Registry, options: Any, says: str
) -> None:
    with pytest.raises(LoadError, match=says):
        pipeline.load("jets@production", registry=registry, shadow="@staging", **options)


def test_a_shadow_of_a_folder_is_refused_without_a_file_for_its_record(gated: Gated) -> None:
    with pytest.raises(LoadError, match="write shadow_record=FILE"):
        pipeline.load(gated.good.path, mode="test", shadow=gated.bad.path)


def test_a_shadow_of_a_folder_has_its_record_in_a_file(gated: Gated, tmp_path: Path) -> None:
    file = tmp_path / "seen.json"
    session = pipeline.load(
        gated.good.path, mode="test",
        shadow=gated.bad.path, shadow_fraction=1.0, shadow_record=file,
    )  # fmt: skip
    run_events(session, 3)
    session.close()
    assert json.loads(file.read_text())["events"] == 3


def test_an_alias_that_nobody_has_is_no_shadow(registry: Registry) -> None:
    with pytest.raises(NotFoundError, match="no such alias"):
        shadowed(registry, shadow="@nobody")


def test_a_session_that_is_not_closed_loses_no_event(registry: Registry) -> None:
    session = shadowed(registry)
    jets, tags, _ = event(session, N)
    binding = session.bind(jets, tags)
    del session
    gc.collect()
    binding()  # the binding keeps the shadow alive
    del binding
    gc.collect()
    assert record_of(registry).events == 1


def test_a_record_that_cannot_be_kept_is_logged(
    registry: Registry, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "here" / "seen.json"
    file.parent.mkdir()
    session = shadowed(registry, shadow_record=file)
    run_events(session, 3)
    file.unlink()
    file.parent.rmdir()
    with pytest.raises(OSError):
        session.flush()
    assert session.seen.events == 3  # kept for the next flush
    with caplog.at_level(logging.WARNING):
        session.close()
    assert "the record of jets/2 is not saved" in caplog.text


def test_after_a_fork_the_shadow_stays_with_the_parent(registry: Registry) -> None:
    session = shadowed(registry)
    jets, tags, features = event(session, N)
    binding = session.bind(jets, tags)
    binding()

    def run_in_child() -> None:
        binding()
        torch.testing.assert_close(read(tags), mlps.PointwiseFirst(1)(features).detach())
        session.close()

    assert in_a_child(run_in_child) == "nothing"
    session.close()
    assert record_of(registry).events == 1


def test_the_files_of_another_version_are_not_added_to(registry: Registry) -> None:
    record = ShadowRecord(
        version="jets/2", digest="0" * 64, production="jets/1", production_digest="1" * 64
    )
    with pytest.raises(RegistryError, match="jets/2: the record is of a shadow with other files"):
        registry.add_shadow(record)
