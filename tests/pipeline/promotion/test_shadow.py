"""A shadow: a second version that runs production's events without delaying it, and its gate."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
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
from tests.pipeline.promotion.conftest import Gated, beside, event, of_production, read, regated

N = 37
TOGETHER = {"shadow": {"min_events": 20, "max_abs": 1e-3}, "metrics": None, "max_slowdown": 1000}


@pytest.fixture
def registry(rivals: Registry) -> Registry:
    return rivals


def shadowed(registry: Registry, **options: Any) -> ShadowedSession:
    asked: dict[str, Any] = {"shadow": "@staging", "shadow_fraction": 1.0}
    return beside(ShadowedSession, registry, **(asked | options))


def run_events(session: Session, count: int, n: int = N) -> float:
    """Runs events of different rows; returns the two models' largest difference on them."""
    largest = 0.0
    jets, tags, features = event(session, 2 * n)
    binding = session.bind(jets, tags)
    with torch.no_grad():
        right, other = (mlps.PointwiseFirst(seed)(features) for seed in (1, 2))
    for i in range(count):
        rows = 1 + (i * 7) % (2 * n)
        binding(rows)
        torch.testing.assert_close(read(tags)[:rows], right[:rows], atol=1e-5, rtol=1e-4)
        largest = max(largest, float((right - other)[:rows].abs().max()))
        if isinstance(session, ShadowedSession) and i % 4 == 3:
            session.flush()  # so that no event is dropped
    return largest


def test_a_planted_difference_is_caught(registry: Registry) -> None:
    session = shadowed(registry)
    expected = run_events(session, 40)
    session.close()
    record = of_production(registry)
    assert (record.version, record.production) == ("jets/2", "jets/1")
    assert (record.events, record.dropped, record.errors) == (40, 0, 0)
    assert record.max_abs["probabilities"] == pytest.approx(expected, rel=1e-3)
    assert record.max_rel["probabilities"] > 0.1
    shown = cli("show", "jets/2", "--registry", registry.uri).stdout
    assert "40 events beside jets/1, 0 errors, 0 dropped" in shown


def test_sessions_add_up(registry: Registry) -> None:
    for _ in range(2):
        session = shadowed(registry)
        run_events(session, 8)
        session.close()
    assert of_production(registry).events == 16


def test_a_fraction_of_the_events(registry: Registry) -> None:
    session = shadowed(registry, shadow_fraction=0.1)
    jets, tags, _ = event(session, N)
    binding = session.bind(jets, tags)
    for _ in range(2000):
        binding()
    session.close()
    record = of_production(registry)
    assert 120 < record.events + record.dropped < 290


def test_a_shadow_of_no_events(registry: Registry) -> None:
    session = shadowed(registry, shadow_fraction=0)
    run_events(session, 100)
    session.close()
    assert registry.find("jets/2").shadows == {}


def test_run_and_run_many(registry: Registry) -> None:
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
    assert of_production(registry).events == 5


def test_a_full_queue_drops_and_counts(registry: Registry) -> None:
    """The shadow waits within an event, and production continues."""
    session = shadowed(registry)
    jets, tags, _ = event(session, N)
    binding = session.bind(jets, tags)
    go = threading.Event()
    inner = session._worker._shadow._executable  # the shadow's thread waits here

    def held(arguments: Any) -> None:
        go.wait()
        inner(arguments)

    session._worker._shadow._executable = Calls(held)
    for _ in range(100):
        binding()
    assert session.seen.dropped >= 90
    go.set()
    session.close()
    record = of_production(registry)
    assert record.events + record.dropped == 100
    assert record.errors == 0


def test_it_works_for_no_more_than_its_fraction_of_the_time(registry: Registry) -> None:
    """A slow shadow drops and counts events; during a flush it does not rest between events."""
    session = shadowed(registry, shadow_fraction=0.1)
    inner = session._worker._shadow._executable
    begins, ends = [], []

    def slow(arguments: Any) -> None:
        begins.append(time.perf_counter())
        time.sleep(0.02)
        inner(arguments)
        ends.append(time.perf_counter())

    session._worker._shadow._executable = Calls(slow)
    jets, tags, _ = event(session, N)
    binding = session.bind(jets, tags)
    calls, begun = 0, time.perf_counter()
    while (passed := time.perf_counter() - begun) < 0.5:
        binding()
        calls += 1
    seen = session.seen
    assert seen.events * 0.02 < 0.1 * passed
    assert seen.events + seen.dropped > 0.05 * calls
    in_time = len(begins)
    session.flush()
    rests = [begin - end for begin, end in zip(begins[in_time + 1 :], ends[in_time:], strict=False)]
    assert min(rests) < 0.2  # without a flush, it rests 0.4 s after each event
    record = of_production(registry)
    assert seen.events < record.events <= seen.events + 9
    session.close()


def test_what_the_shadow_sees_is_the_event_as_it_was(registry: Registry) -> None:
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
    record = of_production(registry, "jets/1")
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
    record = of_production(registry)
    assert (record.events, record.errors) == (0, 8)
    assert record.error == "RuntimeError: out of luck"


def test_nan_on_one_side_is_an_infinite_difference(registry: Registry) -> None:
    session = shadowed(registry)
    jets, tags, _ = event(session, N)
    jets["a"][3] = float("nan")  # both give NaN
    binding = session.bind(jets, tags)
    binding()
    session.flush()
    assert of_production(registry).max_abs["probabilities"] < 1.1
    binding.inner.outputs["tags"]["x"][5] = float("nan")  # now only production gives NaN
    session.offer(binding.inner)
    session.close()
    assert of_production(registry).max_abs["probabilities"] == float("inf")


def test_a_record_in_a_file(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "seen.json"
    session = shadowed(registry, shadow_record=file)
    run_events(session, 25)
    session.close()
    record = ShadowRecord.from_json(file.read_text(), "file")
    assert record.events == 25
    assert registry.find("jets/2").shadows == {}
    with pytest.raises(LoadError, match="is there already: name a new file"):
        shadowed(registry, shadow_record=file)
    with pytest.raises(LoadError, match=r"none.seen\.json cannot be written: No such file"):
        shadowed(registry, shadow_record=tmp_path / "none" / "seen.json")


def test_the_gate(empty: Registry, gated: Gated, tmp_path: Path, measured_once: None) -> None:
    def with_gate(name: str, bundle: Bundle) -> str:
        return empty.register(regated(bundle, tmp_path / name, TOGETHER)).ref

    def asked(ref: str, **options: Any) -> dict[str, Decision]:
        found = promote(empty, ref, "production", dry_run=True, **options)
        return {d.detail.partition(" is ")[0]: d for d in found.decisions if d.gate == "shadow"}

    first = with_gate("first", gated.good)
    assert asked(first) == {}  # nothing is in production
    empty.promote(empty.find(first), "production", PASSED)
    same, other = with_gate("same", gated.good), with_gate("other", gated.bad)
    few = asked(same)["events compared beside jets/1"]
    assert (few.passed, few.found, few.limit) == (False, "0", ">= 20")
    for ref in (same, other):
        empty.promote(empty.find(ref), "staging", PASSED)
        session = shadowed(empty)
        run_events(session, 25)
        session.close()
    assert all(d.passed for d in asked(same).values())
    promote(empty, same, "staging")  # the gate is for production only
    worse = asked(other)
    assert worse["events compared beside jets/1"].passed
    assert worse["errors beside jets/1"].passed
    (gap,) = [d for what, d in worse.items() if what.startswith("largest absolute difference")]
    assert (gap.passed, gap.limit) == (False, "<= 0.001")
    with pytest.raises(PromotionRefused, match="shadow: largest absolute difference of prob"):
        promote(empty, other, "production")

    # If production may not write to the registry, its files of records count.
    later = with_gate("later", gated.good)
    empty.promote(empty.find(later), "staging", PASSED)
    file = tmp_path / "seen.json"
    session = shadowed(empty, shadow_record=file)
    run_events(session, 21)
    session.close()
    assert not asked(later)["events compared beside jets/1"].passed
    counted = asked(later, shadows=[file])
    assert counted["events compared beside jets/1"].found == "21"
    assert all(d.passed for d in counted.values())
    said = answer(
        "promote", later, "--to", "production", "--dry-run", "--shadow", file, registry=empty
    )
    assert said["would_promote"]
    with pytest.raises(RegistryError, match=rf"{later} ran beside jets/1; .* record of {same} "):
        asked(same, shadows=[file])
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"max_abs": {}}))  # an output was not compared
    (missing,) = [d for what, d in asked(later, shadows=[file]).items() if "largest" in what]
    assert not missing.passed
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(RegistryError, match=r"no\.json: not the record of a shadow"):
        asked(later, shadows=[tmp_path / "no.json"])


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
def test_what_cannot_be_shadowed(registry: Registry, options: Any, says: str) -> None:
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


def test_no_such_shadow(registry: Registry) -> None:
    with pytest.raises(NotFoundError, match="no such alias"):
        shadowed(registry, shadow="@nobody")


def test_who_forgets_to_close_loses_nothing(registry: Registry) -> None:
    session = shadowed(registry)
    jets, tags, _ = event(session, N)
    binding = session.bind(jets, tags)
    del session
    gc.collect()
    binding()  # the binding keeps the shadow alive
    del binding
    gc.collect()
    assert of_production(registry).events == 1


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

    def child() -> None:
        binding()
        torch.testing.assert_close(read(tags), mlps.PointwiseFirst(1)(features).detach())
        session.close()

    assert in_a_child(child) == "nothing"
    session.close()
    assert of_production(registry).events == 1


def test_the_files_of_another_version_are_not_added_to(registry: Registry) -> None:
    record = ShadowRecord(
        version="jets/2", digest="0" * 64, production="jets/1", production_digest="1" * 64
    )
    with pytest.raises(RegistryError, match="jets/2: the record is of a shadow with other files"):
        registry.add_shadow(record)
