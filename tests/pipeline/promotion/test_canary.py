"""A canary: a candidate answers a share of production's calls, and the gate sees how it went."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeline
from pipeline.promotion.promoting import promote
from registry.errors import NotFoundError
from registry.promotion import Decision, PromotionRefused
from registry.shadow_record import ShadowRecord
from registry.store.registry import Registry
from registry.version import Version
from runtime.errors import LoadError
from runtime.session.session import Session
from runtime.versions.canary import CanarySession
from tests.models import mlps
from tests.models.forked import in_a_child
from tests.models.project import PASSED, cli, resealed
from tests.models.rogues import Calls
from tests.pipeline.promotion.conftest import Gated, beside, event, read, record_of, regated

N = 37
GATES = {"shadow": {"min_events": 5}, "metrics": None, "max_slowdown": 1000}


@pytest.fixture
def registry(rivals: Registry) -> Registry:
    """jets/1 is in production, and jets/2, another model, in staging."""
    return rivals


def with_canary(registry: Registry, **options: Any) -> CanarySession:
    """A session of production, with what is in staging for a quarter of the calls."""
    return beside(CanarySession, registry, **({"canary": "@staging", "share": 0.25} | options))


def answered_by(session: CanarySession, calls: int) -> list[str]:
    """Runs events; returns the number of the version that answered each, after a comparison with
    that version's model."""
    jets, tags, features = event(session, N)
    with torch.no_grad():
        expected = {str(seed): mlps.PointwiseFirst(seed)(features) for seed in (1, 2)}
    binding = session.bind(jets, tags)
    versions = []
    for _ in range(calls):
        tags["x"][:] = float("nan")
        binding()
        versions.append(str(binding.origin and binding.origin.version))
        torch.testing.assert_close(read(tags), expected[versions[-1]], atol=1e-5, rtol=1e-4)
    return versions


def break_canary(session: CanarySession) -> None:
    """Makes each call of the canary fail from now on."""

    def fails(arguments: object) -> None:
        raise RuntimeError("out of luck")

    session.canary._executable = Calls(fails)


def answer_forty(registry: Registry) -> list[str]:
    """The versions that answered the forty calls of a session."""
    session = with_canary(registry)
    answered = answered_by(session, 40)
    session.close()
    return answered


def test_a_canary_answers_its_share_of_the_calls(registry: Registry) -> None:
    assert answer_forty(registry).count("2") == 10


def test_the_record_counts_the_calls_of_all_sessions(registry: Registry) -> None:
    for _ in range(2):
        answer_forty(registry)
    record = record_of(registry)
    assert (record.version, record.production) == ("jets/2", "jets/1")
    assert (record.canary_calls, record.production_calls, record.errors) == (20, 60, 0)


def test_show_counts_the_calls_of_a_canary(registry: Registry) -> None:
    for _ in range(2):
        answer_forty(registry)
    shown = cli("show", "jets/2", "--registry", registry.uri).stdout
    assert "as a canary 20 calls, of production 60" in " ".join(shown.split())


def test_keys_decide_in_every_session(registry: Registry) -> None:
    def versions_by_key() -> list[str]:
        session = with_canary(registry)
        jets, tags, _ = event(session, N)
        binding = session.bind(jets, tags)
        versions = []
        for key in range(100):
            binding(key=key)
            assert binding.origin is not None
            versions.append(str(binding.origin.version))
        session.close()
        return versions

    first = versions_by_key()
    assert first == versions_by_key()
    assert 10 < first.count("2") < 45  # about a quarter, as by chance


@pytest.fixture
def withdrawn(registry: Registry) -> Registry:
    """The registry after a session whose canary failed; the record was there before its end."""
    session = with_canary(registry)
    break_canary(session)
    assert answered_by(session, 40) == ["1"] * 40
    deadline = time.monotonic() + 60
    while not registry.find("jets/2").shadows:  # another thread saves it
        assert time.monotonic() < deadline
        time.sleep(0.05)
    session.close()
    return registry


def test_a_withdrawn_canary_is_in_the_record_at_once(withdrawn: Registry) -> None:
    record = record_of(withdrawn)
    assert (record.canary_calls, record.production_calls) == (0, 40)
    assert (record.errors, record.withdrawals) == (1, 1)


def test_a_withdrawn_canary_is_in_the_history(withdrawn: Registry) -> None:
    last = withdrawn.history("jets")[-1]
    assert (last.kind, last.version, last.alias) == ("refusal", 2, "production")
    assert "withdrawn as a canary beside jets/1" in last.reason
    assert "RuntimeError: out of luck" in last.reason
    shown = cli("history", "jets", "--registry", withdrawn.uri).stdout
    assert "refusal" in shown and "canary" in shown


@dataclass(frozen=True)
class Candidate:
    """`ref` is in staging beside one version in production; both have the gate of a shadow."""

    registry: Registry
    ref: str

    def canary_gate(self, **options: Any) -> list[Decision]:
        """What the gate says of the version as a canary; empty if it has not been one."""
        assessment = promote(self.registry, self.ref, "production", dry_run=True, **options)
        decisions = [d for d in assessment.decisions if d.gate == "shadow"]
        return [decision for decision in decisions if "canary" in decision.detail]


def run_events(session: Session, count: int) -> None:
    """Runs this many events of N rows."""
    for _ in range(count):
        session.run(*event(session, N)[:2])


@pytest.fixture
def candidate(empty: Registry, gated: Gated, tmp_path: Path, measured_once: None) -> Candidate:
    """Two versions of the same model."""
    first, second = (
        empty.register(regated(gated.good, tmp_path / name, GATES)) for name in ("first", "second")
    )
    empty.promote(first, "production", PASSED)
    empty.promote(second, "staging", PASSED)
    return Candidate(empty, second.ref)


COMPARED = pipeline.CanaryLimits(compare=1)
"""Each answer of the canary is compared with production's."""


def test_the_gate_does_not_ask_for_a_canary(candidate: Candidate) -> None:
    assert candidate.canary_gate() == []


def test_a_canary_that_answered_well_passes_the_gate(
    candidate: Candidate, gated: Gated, tmp_path: Path
) -> None:
    """What a later canary did does not count."""
    session = with_canary(candidate.registry, canary_limits=COMPARED)
    run_events(session, 40)
    session.close()
    third = candidate.registry.register(regated(gated.good, tmp_path / "third", GATES))
    candidate.registry.promote(third, "staging", PASSED)
    later = with_canary(candidate.registry, canary_limits=COMPARED)
    break_canary(later)
    run_events(later, 4)
    later.close()
    (decision,) = candidate.canary_gate()
    assert decision.passed and "answered 10 calls" in decision.detail
    assert record_of(candidate.registry, candidate.ref).events == 10
    promote(candidate.registry, candidate.ref, "production")  # it is not refused


@pytest.fixture
def broken(candidate: Candidate) -> Candidate:
    """The candidate answered well as a canary, and then failed."""
    session = with_canary(candidate.registry, canary_limits=COMPARED)
    run_events(session, 40)
    break_canary(session)
    run_events(session, 4)
    session.close()
    return candidate


def test_a_canary_that_failed_does_not_pass_the_gate(broken: Candidate) -> None:
    (decision,) = broken.canary_gate()
    assert (decision.passed, decision.found, decision.limit) == (False, "1", "<= 0")
    assert "RuntimeError: out of luck" in decision.detail
    with pytest.raises(PromotionRefused, match="shadow: "):
        promote(broken.registry, broken.ref, "production")


def test_the_gate_is_for_production_only(broken: Candidate) -> None:
    promote(broken.registry, broken.ref, "staging")  # it is not refused


def test_a_record_in_a_file_counts_if_the_gate_gets_it(
    candidate: Candidate, tmp_path: Path
) -> None:
    """For a production that may not write to the registry."""
    file = tmp_path / "seen.json"
    session = with_canary(candidate.registry, share=1, shadow_record=file)
    break_canary(session)
    run_events(session, 1)
    session.close()
    assert ShadowRecord.from_json(file.read_text(), "file").withdrawals == 1
    assert candidate.canary_gate() == []
    (decision,) = candidate.canary_gate(shadows=[file])
    assert not decision.passed


@pytest.fixture
def third(registry: Registry, gated: Gated, tmp_path: Path) -> Version:
    """jets/3, another model, which was never promoted."""
    return registry.register(regated(gated.good, tmp_path / "third", {}))


def test_production_takes_only_what_gates_let_in(registry: Registry, third: Version) -> None:
    with pytest.raises(LoadError, match=r"jets/3 was never promoted to staging") as caught:
        with_canary(registry, canary="jets/3")
    assert caught.value.code == "load-not-promoted"


def test_a_canary_of_another_alias_is_taken_by_that_alias(
    registry: Registry, third: Version
) -> None:
    """By its number, only a version that was promoted to staging is."""
    registry.promote(third, "candidate", PASSED)
    with_canary(registry, canary="@candidate").close()
    with pytest.raises(LoadError, match="never promoted to staging"):
        with_canary(registry, canary="jets/3")


@pytest.mark.parametrize(("ref", "number"), [("jets/2", "2"), ("@production", "1")])
def test_a_promoted_version_is_taken_as_a_canary(registry: Registry, ref: str, number: str) -> None:
    session = with_canary(registry, canary=ref)
    assert session.canary.origin is not None and session.canary.origin.version == number
    session.close()


def test_test_mode_takes_any_version_as_a_canary(registry: Registry, third: Version) -> None:
    session = with_canary(registry, canary="jets/3", mode="test")
    assert type(session.canary) is type(session.inner) is not Session
    session.run(*event(session, N)[:2], key=1)
    session.close()


def test_in_test_mode_an_answer_out_of_tolerance_withdraws_the_canary(registry: Registry) -> None:
    session = with_canary(registry, mode="test", share=1)
    execute = session.canary._executable

    def add_one(arguments: Any) -> None:
        execute(arguments)
        arguments[-1][:, :N] += 1

    session.canary._executable = Calls(add_one)
    assert answered_by(session, 3) == ["1"] * 3
    assert "from the reference" in session.withdrawn
    session.close()


def test_production_itself_may_be_the_canary(registry: Registry) -> None:
    """So a job goes on when its candidate has been promoted."""
    session = with_canary(registry, canary="@production")
    assert answered_by(session, 8) == ["1"] * 8
    session.close()
    assert record_of(registry, "jets/1").canary_calls == 2


def test_another_signature_is_refused(registry: Registry, gated: Gated, tmp_path: Path) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["signature"]["rows"]["n"]["max"] += 24

    wider = registry.register(resealed(gated.bad, tmp_path / "wider", edit))
    registry.promote(wider, "staging", PASSED)
    with pytest.raises(LoadError, match="jets/3 has another signature than jets/1"):
        with_canary(registry)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"share": 1.5}, "share=1.5"),
        ({"share": -0.1}, "share=-0.1"),
        ({"share": float("nan")}, "share=nan"),
        (
            {"share": 1, "canary_limits": pipeline.CanaryLimits(max_slowdown=2)},
            "max_slowdown with share=1",
        ),
        ({"share": "0.1"}, "share is '0.1'"),
        ({"canary": ["@staging", "jets/2"]}, "canary is "),
        ({"canary_limits": 5}, "canary_limits is 5"),
        ({"shadow": "@staging"}, "a canary runs beside one version"),
        ({"live": True}, "a canary runs beside one version"),
        ({"device": "auto"}, "a canary runs beside one version"),
        (
            {"canary": None, "canary_limits": pipeline.CanaryLimits()},
            "name one",
        ),
        ({"canary": None, "shadow_record": "seen.json"}, "name one"),
    ],
)
def test_options_that_contradict_each_other_or_mean_nothing_are_refused(
    registry: Registry, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(LoadError, match=says) as caught:
        with_canary(registry, **options)
    assert "\n" not in str(caught.value)


def test_an_alias_that_nobody_has_is_no_canary(registry: Registry) -> None:
    with pytest.raises(NotFoundError, match="no such alias"):
        with_canary(registry, canary="@nobody")


@pytest.fixture
def looked_up(registry: Registry) -> Registry:
    """The registry, of which this host has kept the lookup of production with a canary."""
    with_canary(registry, lookup="prefer-cache").close()
    return registry


def test_a_canary_without_the_registry_has_its_record_in_a_file(
    looked_up: Registry, tmp_path: Path
) -> None:
    file = tmp_path / "seen.json"
    session = with_canary(looked_up, lookup="offline", shadow_record=file)
    assert answered_by(session, 8).count("2") == 2
    session.close()
    assert ShadowRecord.from_json(file.read_text(), "file").canary_calls == 2


def test_a_canary_without_the_registry_needs_a_file_for_its_record(looked_up: Registry) -> None:
    with pytest.raises(LoadError, match="write shadow_record=FILE"):
        with_canary(looked_up, lookup="offline")


def test_the_lookup_of_a_canary_is_none_of_the_alias_for_production(looked_up: Registry) -> None:
    with pytest.raises(LoadError, match="not known here"):
        pipeline.load("jets@staging", registry=looked_up, lookup="offline")


def test_a_session_that_is_not_closed_loses_no_call(registry: Registry) -> None:
    session = with_canary(registry, share=1)
    binding = session.bind(*event(session, N)[:2])
    del session
    gc.collect()
    binding()
    del binding
    gc.collect()
    assert record_of(registry).canary_calls == 1


def test_after_a_fork_the_record_stays_with_the_parent(registry: Registry) -> None:
    session = with_canary(registry, share=0.5)
    assert answered_by(session, 2).count("2") == 1

    def run_in_child() -> None:
        assert answered_by(session, 4).count("2") == 2
        session.close()

    assert in_a_child(run_in_child) == "nothing"
    session.close()
    record = record_of(registry)
    assert (record.canary_calls, record.production_calls) == (1, 1)
