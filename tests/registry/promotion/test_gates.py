"""The decision of each gate on measurements, and how a refusal can be overridden."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry import Decision, Manifest, RegistryError, SpeedComparison, SpeedPoint, Worst, decide
from registry.promotion import Bits, Proof, SetResult, SignatureCheck, override
from soa.records import as_data, as_record
from tests.models.bundles import manifest_data
from tests.models.findings import V3, findings

ROCM, SM90, ARM = "rocm/gfx90a", "cuda/sm_90", "cpu/armv8.2-a"
BAD = {"probabilities": Worst(max_abs=0.25, max_rel=0.5, outside=0.125)}
NAN = {"probabilities": Worst(max_abs=math.nan, max_rel=math.nan, outside=math.nan)}
DAY = timedelta(days=1)

Ask = Callable[..., dict[str, Decision]]


@pytest.fixture
def ask(manifest: Manifest) -> Ask:
    """The decision of each gate; if a gate makes several, the first refusal."""

    def asked(manifest: Manifest = manifest, **changes: Any) -> dict[str, Decision]:
        decisions = decide(findings(manifest, **changes))
        found = {d.gate: d for d in reversed(decisions)}
        return found | {d.gate: d for d in decisions if not d.passed}

    return asked


@pytest.fixture
def three() -> Manifest:
    """A version with an untested target, and with one for which every candidate failed."""
    rocm = {
        "status": "unverified",
        "chosen": "aoti",
        "candidates": {"aoti": {"status": "valid", "files": ["targets/rocm/gfx90a/aoti/m.pt2"]}},
    }
    data = manifest_data()
    targets = data["targets"] | {ROCM: rocm, SM90: {"status": "failed"}}
    return as_record(Manifest, data | {"targets": targets})


def refusals(decisions: dict[str, Decision]) -> set[str]:
    return {gate for gate, decision in decisions.items() if not decision.passed}


def test_all_pass_in_order(ask: Ask, manifest: Manifest) -> None:
    in_order = [d.gate for d in decide(findings(manifest))]
    assert in_order == ["digests", "verified", "tolerance", "reference", "speed"]
    assert refusals(ask()) == set()
    assert "no version in place" in ask()["speed"].detail


def test_every_gate_is_asked_after_a_refusal(ask: Ask) -> None:
    slow = SpeedComparison("jets/1", (SpeedPoint(V3, 1000, new_us=300.0, old_us=200.0),))
    refused = ask(targets=("cpu/x86-64-v4",), speed=slow, proof=Proof(0.49, 0.01, "49% is NaN"))
    assert refusals(refused) == {"verified", "tolerance", "reference", "speed"}
    assert refused["reference"].detail == "49% is NaN"


def test_targets(ask: Ask, three: Manifest) -> None:
    assert "at least 1" in ask(targets=())["verified"].detail
    absent = ask(three, targets=("cpu/none",))["verified"]
    assert f"cpu/none is not in the bundle, which has {V3}, {ROCM}" in absent.detail
    failed = ask(three, targets=(SM90,), allow_unverified=frozenset({SM90, V3}))
    assert refusals(failed) == {"verified", "tolerance"}
    assert failed["verified"].detail == f"{SM90} is failed, verified is needed"


def test_unverified_passes_only_by_name(ask: Ask, three: Manifest) -> None:
    asked: dict[str, Any] = {"targets": (V3, ROCM)}
    allowed = frozenset({ROCM})
    assert refusals(ask(three, **asked)) == {"verified", "tolerance"}
    assert refusals(ask(three, **asked, allow_unverified=allowed)) == set()
    assert refusals(ask(three, **asked, allow_unverified=frozenset({V3})))
    named = ask(three, **asked, allow_unverified=allowed, named_targets=allowed)
    assert named["verified"].detail.endswith("run it there, a policy names it")
    assert not named["tolerance"].passed


def emulated(deviations: Worst | None) -> Manifest:
    """A version whose ARM target was only run on an emulator."""
    file = {"files": ["targets/cpu/armv8.2-a/lanes/network.so"], "status": "emulated"}
    worst = {} if deviations is None else {"probabilities": asdict(deviations)}
    arm = {
        "status": "emulated",
        "chosen": "lanes",
        "candidates": {"lanes": {**file, "worst": worst}},
    }
    data = manifest_data()
    return as_record(Manifest, data | {"targets": data["targets"] | {ARM: arm}})


def test_what_was_emulated_reaches_staging_and_not_production(ask: Ask) -> None:
    good = emulated(Worst(max_abs=1e-7, max_rel=1e-6, outside=0.0))
    asked: dict[str, Any] = {"targets": (V3, ARM)}
    assert refusals(ask(good, **asked, production=False)) == set()
    refused = ask(good, **asked)
    assert refusals(refused) == {"verified", "tolerance"}
    assert refused["verified"].detail.startswith(f"{ARM} is emulated, verified is needed")
    assert refusals(ask(good, **asked, allow_unverified=frozenset({ARM}))) == set()
    assert refusals(ask(emulated(None), **asked, production=False)) == {"tolerance"}
    bad = emulated(Worst(max_abs=1.0, max_rel=1.0, outside=0.5))
    assert refusals(ask(bad, **asked, production=False)) == {"tolerance"}


def test_what_only_compiles_reaches_nothing(ask: Ask) -> None:
    data = as_data(emulated(None))
    data["targets"][ARM] |= {"status": "compiles"}
    data["targets"][ARM]["candidates"]["lanes"]["status"] = "compiles"
    manifest = as_record(Manifest, data)
    asked: dict[str, Any] = {"targets": (V3, ARM), "production": False}
    assert refusals(ask(manifest, **asked)) == {"verified", "tolerance"}
    assert refusals(ask(manifest, **asked, allow_unverified=frozenset({ARM}))) == set()


def test_allowing_never_excuses_what_was_measured(ask: Ask, three: Manifest) -> None:
    for target in (ROCM, V3):
        asked: dict[str, Any] = {"targets": (target,), "allow_unverified": frozenset({target})}
        assert refusals(ask(three, **asked, worst={target: BAD})) == {"tolerance"}
    assert refusals(ask(three, worst={}, allow_unverified=frozenset({V3}))) == {"tolerance"}


def test_tolerance_names_number_and_limit(ask: Ask) -> None:
    detail = ask(worst={V3: BAD})["tolerance"].detail
    for part in (V3, "probabilities", "0.125", "atol 1e-05 rtol 0.0001", "limit 0", "0.25"):
        assert part in detail


@pytest.mark.parametrize(
    ("stored", "asked", "of_output", "passes"),
    [
        (0.2, 0.2, {}, True),
        (0.0, 0.2, {}, False),
        (0.2, 0.0, {}, False),
        (1.0, 1.0, {"probabilities": 0.2}, True),
        (1.0, 1.0, {"probabilities": 0.1}, False),
        (1.0, 1.0, {"probabilties": 0.5}, False),  # no such output
    ],
)
def test_the_strictest_limit_counts(
    ask: Ask, stored: float, asked: float, of_output: dict[str, float], passes: bool
) -> None:
    data = manifest_data()
    data["tolerances"]["probabilities"]["max_outside"] = stored
    manifest = as_record(Manifest, data)
    limits = {"max_outside": asked, "max_outside_by_output": of_output}
    gate = ask(manifest, worst={V3: BAD}, **limits)["tolerance"]
    assert gate.passed is passes
    if "probabilties" in of_output:
        assert "there is no output probabilties" in gate.detail


@pytest.mark.parametrize(
    ("worst", "says"),
    [({}, "not run again"), ({V3: {}}, "not run again"), ({V3: {"y": BAD}}, "was not compared")],
)
def test_not_run_again(ask: Ask, worst: Any, says: str) -> None:
    assert says in ask(worst=worst)["tolerance"].detail


def test_nan_passes_nothing(ask: Ask) -> None:
    assert "tolerance" in refusals(ask(worst={V3: NAN}, max_outside=1.0))
    points = (SpeedPoint(V3, 10, math.nan, 1.0), SpeedPoint(V3, 1000, 1.0, 1.0))
    assert "speed" in refusals(ask(speed=SpeedComparison("jets/1", points)))
    zero = SpeedComparison("jets/1", (SpeedPoint(V3, 10, 1.0, 0.0),))
    assert "speed" in refusals(ask(speed=zero))


def test_speed_names_the_worst_point(ask: Ask) -> None:
    points = (SpeedPoint(V3, 10, 9.0, 10.0), SpeedPoint(V3, 1000, 300.0, 200.0))
    speed = SpeedComparison("jets/1", points)
    for part in (f"{V3} at n=1000", "300 µs", "200 µs of jets/1", "ratio 1.5", "limit 1.1"):
        assert part in ask(speed=speed)["speed"].detail
    assert refusals(ask(speed=speed, max_slowdown=1.5)) == set()
    assert "not measured beside jets/1" in ask(speed=SpeedComparison("jets/1", ()))["speed"].detail


@given(ratio=st.floats(0.1, 10.0), limit=st.floats(0.1, 10.0))
def test_speed_limit(ratio: float, limit: float) -> None:
    manifest = as_record(Manifest, manifest_data())
    speed = SpeedComparison("m/1", (SpeedPoint(V3, 1, ratio, 1.0),))
    decisions = {d.gate: d for d in decide(findings(manifest, speed=speed, max_slowdown=limit))}
    assert decisions["speed"].passed is (ratio <= limit)


def test_reference_set(ask: Ask) -> None:
    good = {"probabilities": Worst(max_abs=0, max_rel=0, outside=0)}
    for worst in (good, BAD, NAN, None):
        gate = ask(sets=[SetResult("big.safetensors", V3, "aoti", worst)])["reference set"]
        assert gate.passed is (worst is good)
        assert "aoti beside the portable program on big.safetensors" in gate.detail


def test_time_in_staging(ask: Ask) -> None:
    for time, passes in [(None, False), (DAY / 2, False), (DAY, True), (DAY * 2, True)]:
        gate = ask(in_staging=time, min_time_in_staging=DAY)["staging"]
        assert gate.passed is passes
        assert "24 h" in gate.detail


def test_approvals(ask: Ask) -> None:
    for given_by, passes in [([], False), (["Ada"], False), (["Bob", "Ada", "Eve"], True)]:
        gate = ask(approvals=("Ada", "Bob"), approved_by=given_by)["approvals"]
        assert gate.passed is passes
        assert ("missing: Bob" in gate.detail) is (given_by == ["Ada"])


def test_signature(ask: Ask) -> None:
    assert ask(signature=SignatureCheck("ab", found="ab"))["signature"].passed
    gate = ask(signature=SignatureCheck("ab", error="not signed"))["signature"]
    assert (gate.passed, gate.detail) == (False, "not signed")


def test_override() -> None:
    slow = Decision("speed", False, "ratio 1.5", "ratio <= 1.1", "ratio 1.5, limit 1.1")
    good = Decision("tolerance", True, "outside 0", "outside <= 0", "fine")
    altered = Decision("digests", False, "altered", "as sealed", "program.pt2 is altered")
    found = override([altered, good, slow], ["speed", "tolerance"], "on purpose")
    assert [d.answer for d in found] == ["REFUSED", "passed", "overridden"]
    assert [d.override for d in found] == ["", "", "on purpose"]
    assert [d.lets_pass for d in found] == [False, True, True]
    for gate, reason, says in [
        ("digests", "on purpose", "'digests' cannot be overridden"),
        ("sped", "on purpose", "no gate 'sped' was asked; there are: tolerance, speed"),
        ("speed", "", "takes a reason"),
        ("speed", "  ", "takes a reason"),
    ]:
        with pytest.raises(RegistryError, match=says):
            override([altered, good, slow], [gate], reason)


def bits(how: str, digest: str | None, target: str = V3, every: bool = False) -> Bits:
    return Bits(target, "aoti", how, digest, "" if digest else "it is not here", every)


@pytest.mark.parametrize(
    ("found", "passes", "says"),
    [
        ([bits("here", "a"), bits("on another", "a")], True, "the same bits in 2 ways"),
        ([bits("here", "a"), bits("on another", "b")], False, "aoti on another gives other bits"),
        ([bits("here", "a"), bits("with 2 threads", "b", every=True)], True, "the same bits"),
        ([bits("here", "a"), bits("on another", None)], True, "not measured on another: it is not"),
        ([bits("here", None)], False, "not measured (it is not here), the same bits must be shown"),
        ([], False, "not measured (this host does not run it)"),
    ],
)
def test_reproducible(ask: Ask, found: list[Bits], passes: bool, says: str) -> None:
    decision = ask(reproducible=True, bits=found)["reproducible"]
    assert decision.passed is passes and says in decision.detail
    assert "reproducible" not in ask(bits=found)


@pytest.mark.parametrize(
    ("capture", "known", "says"),
    [
        ({"dependence": ""}, "shown", "is shown by the program's graph"),
        ({"dependence": "", "tried": "aten.some is unknown"}, "tried", "aten.some is unknown"),
        ({"dependence": "aten.sum works across the rows"}, "not shown", "aten.sum works across"),
        ({}, "not shown", "an older release recorded nothing"),
    ],
)
def test_the_rows_of_a_version_must_be_shown_to_be_independent(
    ask: Ask, capture: dict[str, Any], known: str, says: str
) -> None:
    version = as_record(Manifest, manifest_data() | {"capture": capture})
    decision = ask(version, shown=True)["independence"]
    assert (decision.passed, decision.found) == (known == "shown", known)
    assert says in decision.detail


def test_independent_rows_are_no_gate_unless_a_policy_asks(ask: Ask) -> None:
    assert "independence" not in ask()


def test_reproducible_between_levels(ask: Ask) -> None:
    v4 = "cpu/x86-64-v4"
    data = manifest_data()
    one = data["targets"][V3]

    def asked(other: dict[str, Any], digest: str) -> Decision:
        both = as_record(Manifest, data | {"targets": {V3: one, v4: other}})
        found = [bits("here", "a"), bits("here", digest, v4)]
        return ask(both, targets=(V3, v4), reproducible=True, bits=found)["reproducible"]

    assert asked(one, "a").passed
    assert f"aoti here gives other bits than {V3} here" in asked(one, "b").detail
    third = {**one, "chosen": "exported"}
    third["candidates"] = {"exported": one["candidates"][one["chosen"]]}
    assert "the levels run different engines" in asked(third, "a").detail
