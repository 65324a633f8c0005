"""A canary: a candidate answers a share of production's calls, and the gate sees how it went."""

from __future__ import annotations

import gc
import time
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
from runtime.errors import LoadError
from runtime.session.session import Session
from runtime.versions.canary import CanarySession
from tests.models import mlps
from tests.models.forked import in_a_child
from tests.models.project import PASSED, cli, resealed
from tests.models.rogues import Calls
from tests.pipeline.promotion.conftest import Gated, beside, event, of_production, read, regated

N = 37
GATES = {"shadow": {"min_events": 5}, "metrics": None, "max_slowdown": 1000}


@pytest.fixture
def registry(rivals: Registry) -> Registry:
    return rivals


def with_canary(registry: Registry, **options: Any) -> CanarySession:
    return beside(CanarySession, registry, **({"canary": "@staging", "share": 0.25} | options))


def answered_by(session: CanarySession, calls: int) -> list[str]:
    """Runs events; returns the number of the version that answered each, after a comparison with
    that version's model."""
    jets, tags, features = event(session, N)
    with torch.no_grad():
        right = {str(seed): mlps.PointwiseFirst(seed)(features) for seed in (1, 2)}
    binding = session.bind(jets, tags)
    found = []
    for _ in range(calls):
        tags["x"][:] = float("nan")
        binding()
        found.append(str(binding.origin and binding.origin.version))
        torch.testing.assert_close(read(tags), right[found[-1]], atol=1e-5, rtol=1e-4)
    return found


def out_of_luck(session: CanarySession) -> None:
    """Makes the canary fail from now on."""

    def fails(arguments: object) -> None:
        raise RuntimeError("out of luck")

    session.canary._executable = Calls(fails)


def answer_forty(registry: Registry) -> list[str]:
    """The versions that answered the forty calls of a session."""
    session = with_canary(registry)
    answered = answered_by(session, 40)
    session.close()
    return answered


def test_it_answers_its_share(registry: Registry) -> None:
    assert answer_forty(registry).count("2") == 10


def test_the_record_counts_the_calls_of_all_sessions(registry: Registry) -> None:
    for _ in range(2):
        answer_forty(registry)
    record = of_production(registry)
    assert (record.version, record.production) == ("jets/2", "jets/1")
    assert (record.canary_calls, record.production_calls, record.errors) == (20, 60, 0)


def test_show_counts_the_calls_of_a_canary(registry: Registry) -> None:
    for _ in range(2):
        answer_forty(registry)
    shown = cli("show", "jets/2", "--registry", registry.uri).stdout
    assert "as a canary 20 calls, of production 60" in " ".join(shown.split())


def test_keys_decide_in_every_session(registry: Registry) -> None:
    def of_keys() -> list[str]:
        session = with_canary(registry)
        jets, tags, _ = event(session, N)
        binding = session.bind(jets, tags)
        found = []
        for key in range(100):
            binding(key=key)
            assert binding.origin is not None
            found.append(str(binding.origin.version))
        session.close()
        return found

    first = of_keys()
    assert first == of_keys()
    assert 10 < first.count("2") < 45


def test_a_withdrawn_canary_is_in_the_record_at_once(registry: Registry) -> None:
    session = with_canary(registry)
    out_of_luck(session)
    assert answered_by(session, 40) == ["1"] * 40
    end = time.monotonic() + 60
    while not registry.find("jets/2").shadows:  # another thread saves it
        assert time.monotonic() < end
        time.sleep(0.05)
    session.close()
    record = of_production(registry)
    assert (record.canary_calls, record.production_calls) == (0, 40)
    assert (record.errors, record.withdrawals) == (1, 1)
    last = registry.history("jets")[-1]
    assert (last.kind, last.version, last.alias) == ("refusal", 2, "production")
    assert "withdrawn as a canary beside jets/1" in last.reason
    assert "RuntimeError: out of luck" in last.reason
    shown = cli("history", "jets", "--registry", registry.uri).stdout
    assert "refusal" in shown and "canary" in shown


def test_the_gate(empty: Registry, gated: Gated, tmp_path: Path, measured_once: None) -> None:
    def asked(ref: str, **options: Any) -> list[Decision]:
        found = promote(empty, ref, "production", dry_run=True, **options)
        return [d for d in found.decisions if d.gate == "shadow" and "canary" in d.detail]

    bundles = [regated(gated.good, tmp_path / name, GATES) for name in ("one", "two", "three")]
    one, two, three = (empty.register(bundle).ref for bundle in bundles)
    empty.promote(empty.find(one), "production", PASSED)
    for ref in (two, three):
        empty.promote(empty.find(ref), "staging", PASSED)
        assert asked(ref) == []
        session = with_canary(empty, canary_limits=pipeline.CanaryLimits(compare=1))
        for _ in range(40):
            session.run(*event(session, N)[:2])
        if ref == three:
            out_of_luck(session)
            for _ in range(4):
                session.run(*event(session, N)[:2])
        session.close()
    (well,) = asked(two)
    assert well.passed and "answered 10 calls" in well.detail
    assert of_production(empty, two).events == 10
    promote(empty, three, "staging")  # the gate is for production only
    (badly,) = asked(three)
    assert (badly.passed, badly.found, badly.limit) == (False, "1", "<= 0")
    assert "RuntimeError: out of luck" in badly.detail
    with pytest.raises(PromotionRefused, match="shadow: "):
        promote(empty, three, "production")
    promote(empty, two, "production")

    # If production may not write to the registry, its files of records count.
    empty.promote(empty.find(one), "staging", PASSED)
    file = tmp_path / "seen.json"
    session = with_canary(empty, share=1, shadow_record=file)
    out_of_luck(session)
    session.run(*event(session, N)[:2])
    session.close()
    assert ShadowRecord.from_json(file.read_text(), "file").withdrawals == 1
    assert asked(one) == []
    (counted,) = asked(one, shadows=[file])
    assert not counted.passed


def test_production_takes_only_what_gates_let_in(
    registry: Registry, gated: Gated, tmp_path: Path
) -> None:
    registry.register(regated(gated.good, tmp_path / "third", {}))
    with pytest.raises(LoadError, match=r"jets/3 was never promoted to staging") as caught:
        with_canary(registry, canary="jets/3")
    assert caught.value.code == "load-not-promoted"
    registry.promote(registry.find("jets/3"), "candidate", PASSED)
    for ref in ("@candidate", "jets/2", "@production"):
        with_canary(registry, canary=ref).close()
    with pytest.raises(LoadError, match="never promoted to staging"):
        with_canary(registry, canary="jets/3")  # not by the alias that it was promoted to
    tested = with_canary(registry, canary="jets/3", mode="test")
    assert type(tested.canary) is type(tested.inner) is not Session
    tested.run(*event(tested, N)[:2], key=1)
    tested.close()


def test_in_test_mode_an_answer_out_of_tolerance_withdraws_it(registry: Registry) -> None:
    session = with_canary(registry, mode="test", share=1)
    right = session.canary._executable

    def off(arguments: Any) -> None:
        right(arguments)
        arguments[-1][:, :N] += 1

    session.canary._executable = Calls(off)
    assert answered_by(session, 3) == ["1"] * 3
    assert "from the reference" in session.withdrawn
    session.close()


def test_production_itself_may_be_the_canary(registry: Registry) -> None:
    """So a job goes on when its candidate has been promoted."""
    session = with_canary(registry, canary="@production")
    assert answered_by(session, 8) == ["1"] * 8
    session.close()
    assert of_production(registry, "jets/1").canary_calls == 2


def test_another_signature_is_refused(registry: Registry, gated: Gated, tmp_path: Path) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["signature"]["rows"]["n"]["max"] += 24

    made = registry.register(resealed(gated.bad, tmp_path / "wider", edit))
    registry.promote(made, "staging", PASSED)
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
def test_what_cannot_be(registry: Registry, options: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadError, match=says) as caught:
        with_canary(registry, **options)
    assert "\n" not in str(caught.value)


def test_no_such_canary(registry: Registry) -> None:
    with pytest.raises(NotFoundError, match="no such alias"):
        with_canary(registry, canary="@nobody")


def test_without_the_registry(registry: Registry, tmp_path: Path) -> None:
    """The lookup of a canary is recorded beside, not instead of, one for production."""
    with_canary(registry, lookup="prefer-cache").close()
    offline = {"lookup": "offline", "shadow_record": tmp_path / "seen.json"}
    session = with_canary(registry, **offline)
    assert answered_by(session, 8).count("2") == 2
    session.close()
    with pytest.raises(LoadError, match="not known here"):
        pipeline.load("jets@staging", registry=registry, lookup="offline")
    with pytest.raises(LoadError, match="write shadow_record=FILE"):
        with_canary(registry, lookup="offline")


def test_who_forgets_to_close_loses_nothing(registry: Registry) -> None:
    session = with_canary(registry, share=1)
    binding = session.bind(*event(session, N)[:2])
    del session
    gc.collect()
    binding()
    del binding
    gc.collect()
    assert of_production(registry).canary_calls == 1


def test_after_a_fork_the_record_stays_with_the_parent(registry: Registry) -> None:
    session = with_canary(registry, share=0.5)
    assert answered_by(session, 2).count("2") == 1

    def child() -> None:
        assert answered_by(session, 4).count("2") == 2
        session.close()

    assert in_a_child(child) == "nothing"
    session.close()
    record = of_production(registry)
    assert (record.canary_calls, record.production_calls) == (1, 1)
