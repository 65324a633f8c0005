"""The decision of each gate on measurements, and how a refusal can be overridden."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given
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
    """`ask(manifest, **fields of Findings or Requirements)`: the decision of each gate.

    If a gate makes several, its last refusal, or its first decision if there is no refusal.
    """

    def decisions_of(manifest: Manifest = manifest, **changes: Any) -> dict[str, Decision]:
        decisions = decide(findings(manifest, **changes))
        firsts = {decision.gate: decision for decision in reversed(decisions)}
        return firsts | {item.gate: item for item in decisions if not item.passed}

    return decisions_of


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


def test_gates_are_asked_in_order(manifest: Manifest) -> None:
    gates = [decision.gate for decision in decide(findings(manifest))]
    assert gates == ["digests", "verified", "tolerance", "reference", "speed"]


def test_a_good_version_passes_all_gates(ask: Ask) -> None:
    assert refusals(ask()) == set()


def test_speed_passes_if_no_version_is_in_place(ask: Ask) -> None:
    assert "no version in place" in ask()["speed"].detail


def test_every_gate_is_asked_after_a_refusal(ask: Ask) -> None:
    slow = SpeedComparison("jets/1", (SpeedPoint(V3, 1000, new_us=300.0, old_us=200.0),))
    refused = ask(targets=("cpu/x86-64-v4",), speed=slow, proof=Proof(0.49, 0.01, "49% is NaN"))
    assert refusals(refused) == {"verified", "tolerance", "reference", "speed"}
    assert refused["reference"].detail == "49% is NaN"


def test_at_least_one_target_is_needed(ask: Ask) -> None:
    assert "at least 1" in ask(targets=())["verified"].detail


def test_a_target_that_the_bundle_lacks_is_refused(ask: Ask, three: Manifest) -> None:
    absent = ask(three, targets=("cpu/none",))["verified"]
    assert f"cpu/none is not in the bundle, which has {V3}, {ROCM}" in absent.detail


def test_a_failed_target_is_refused_although_it_is_allowed(ask: Ask, three: Manifest) -> None:
    failed = ask(three, targets=(SM90,), allow_unverified=frozenset({SM90, V3}))
    assert refusals(failed) == {"verified", "tolerance"}
    assert failed["verified"].detail == f"{SM90} is failed, verified is needed"


def test_unverified_passes_only_by_name(ask: Ask, three: Manifest) -> None:
    targets = (V3, ROCM)
    assert refusals(ask(three, targets=targets)) == {"verified", "tolerance"}
    assert refusals(ask(three, targets=targets, allow_unverified=frozenset({ROCM}))) == set()
    assert refusals(ask(three, targets=targets, allow_unverified=frozenset({V3})))


def test_an_unverified_target_that_a_policy_names_does_not_pass(ask: Ask, three: Manifest) -> None:
    rocm = frozenset({ROCM})
    named = ask(three, targets=(V3, ROCM), allow_unverified=rocm, named_targets=rocm)
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


SMALL = Worst(max_abs=1e-7, max_rel=1e-6, outside=0.0)


def test_an_emulated_target_reaches_staging(ask: Ask) -> None:
    assert refusals(ask(emulated(SMALL), targets=(V3, ARM), production=False)) == set()


def test_an_emulated_target_does_not_reach_production(ask: Ask) -> None:
    refused = ask(emulated(SMALL), targets=(V3, ARM))
    assert refusals(refused) == {"verified", "tolerance"}
    assert refused["verified"].detail.startswith(f"{ARM} is emulated, verified is needed")


def test_an_emulated_target_reaches_production_if_it_is_allowed(ask: Ask) -> None:
    allowed = frozenset({ARM})
    assert refusals(ask(emulated(SMALL), targets=(V3, ARM), allow_unverified=allowed)) == set()


@pytest.mark.parametrize(
    "deviations",
    [None, Worst(max_abs=1.0, max_rel=1.0, outside=0.5)],
    ids=["not measured", "too large"],
)
def test_an_emulated_target_needs_small_deviations(ask: Ask, deviations: Worst | None) -> None:
    decisions = ask(emulated(deviations), targets=(V3, ARM), production=False)
    assert refusals(decisions) == {"tolerance"}


def test_a_target_that_only_compiles_reaches_nothing_unless_it_is_allowed(ask: Ask) -> None:
    data = as_data(emulated(None))
    data["targets"][ARM] |= {"status": "compiles"}
    data["targets"][ARM]["candidates"]["lanes"]["status"] = "compiles"
    manifest = as_record(Manifest, data)
    options: dict[str, Any] = {"targets": (V3, ARM), "production": False}
    assert refusals(ask(manifest, **options)) == {"verified", "tolerance"}
    assert refusals(ask(manifest, **options, allow_unverified=frozenset({ARM}))) == set()


@pytest.mark.parametrize("target", [ROCM, V3])
def test_an_allowed_target_needs_small_deviations(ask: Ask, three: Manifest, target: str) -> None:
    allowed = frozenset({target})
    decisions = ask(three, targets=(target,), allow_unverified=allowed, worst={target: BAD})
    assert refusals(decisions) == {"tolerance"}


def test_a_verified_target_is_measured_although_it_is_allowed(ask: Ask, three: Manifest) -> None:
    assert refusals(ask(three, worst={}, allow_unverified=frozenset({V3}))) == {"tolerance"}


def test_tolerance_names_number_and_limit(ask: Ask) -> None:
    detail = ask(worst={V3: BAD})["tolerance"].detail
    for part in (V3, "probabilities", "0.125", "atol 1e-05 rtol 0.0001", "limit 0", "0.25"):
        assert part in detail


@pytest.mark.parametrize(
    ("in_manifest", "in_config", "by_output", "passes"),
    [
        (0.2, 0.2, {}, True),
        (0.0, 0.2, {}, False),
        (0.2, 0.0, {}, False),
        (1.0, 1.0, {"probabilities": 0.2}, True),
        (1.0, 1.0, {"probabilities": 0.1}, False),
    ],
)
def test_the_strictest_limit_counts(
    ask: Ask, in_manifest: float, in_config: float, by_output: dict[str, float], passes: bool
) -> None:
    """An eighth of the values of `BAD` are outside."""
    data = manifest_data()
    data["tolerances"]["probabilities"]["max_outside"] = in_manifest
    limits = {"max_outside": in_config, "max_outside_by_output": by_output}
    decisions = ask(as_record(Manifest, data), worst={V3: BAD}, **limits)
    assert decisions["tolerance"].passed is passes


def test_a_limit_for_an_output_that_there_is_not_is_refused(ask: Ask) -> None:
    gate = ask(max_outside_by_output={"probabilties": 0.5})["tolerance"]
    assert not gate.passed
    assert "there is no output probabilties" in gate.detail


@pytest.mark.parametrize(
    ("worst", "detail"),
    [({}, "not run again"), ({V3: {}}, "not run again"), ({V3: {"y": BAD}}, "was not compared")],
    ids=["no target", "no engine", "another output"],
)
def test_the_tolerance_of_a_target_that_was_not_run_again_is_refused(
    ask: Ask, worst: Any, detail: str
) -> None:
    assert detail in ask(worst=worst)["tolerance"].detail


def one_point(new_us: float, old_us: float) -> SpeedComparison:
    return SpeedComparison("jets/1", (SpeedPoint(V3, 10, new_us, old_us),))


@pytest.mark.parametrize(
    ("gate", "measured"),
    [
        ("tolerance", {"worst": {V3: NAN}, "max_outside": 1.0}),
        ("speed", {"speed": one_point(math.nan, 1.0)}),
        ("speed", {"speed": one_point(1.0, 0.0)}),
    ],
    ids=["deviations", "time", "ratio to no time"],
)
def test_nan_passes_nothing(ask: Ask, gate: str, measured: dict[str, Any]) -> None:
    assert gate in refusals(ask(**measured))


def test_a_point_of_speed_that_is_nan_is_the_worst(ask: Ask) -> None:
    points = (SpeedPoint(V3, 10, math.nan, 1.0), SpeedPoint(V3, 1000, 1.0, 1.0))
    assert "speed" in refusals(ask(speed=SpeedComparison("jets/1", points)))


def test_speed_names_the_worst_point(ask: Ask) -> None:
    points = (SpeedPoint(V3, 10, 9.0, 10.0), SpeedPoint(V3, 1000, 300.0, 200.0))
    speed = SpeedComparison("jets/1", points)
    detail = ask(speed=speed)["speed"].detail
    for part in (f"{V3} at n=1000", "300 µs", "200 µs of jets/1", "ratio 1.5", "limit 1.1"):
        assert part in detail
    assert refusals(ask(speed=speed, max_slowdown=1.5)) == set()


def test_a_speed_that_was_not_measured_is_refused(ask: Ask) -> None:
    gate = ask(speed=SpeedComparison("jets/1", ()))["speed"]
    assert not gate.passed
    assert "not measured beside jets/1" in gate.detail


@given(ratio=st.floats(0.1, 10.0), limit=st.floats(0.1, 10.0))
@example(ratio=1.5, limit=1.5)
def test_a_speed_up_to_the_limit_passes(ratio: float, limit: float) -> None:
    manifest = as_record(Manifest, manifest_data())
    speed = SpeedComparison("m/1", (SpeedPoint(V3, 1, ratio, 1.0),))
    decisions = {
        decision.gate: decision
        for decision in decide(findings(manifest, speed=speed, max_slowdown=limit))
    }
    assert decisions["speed"].passed is (ratio <= limit)


@pytest.mark.parametrize(
    ("worst", "passes"),
    [
        ({"probabilities": Worst(max_abs=0, max_rel=0, outside=0)}, True),
        (BAD, False),
        (NAN, False),
        (None, False),
    ],
    ids=["equal", "outside", "NaN", "not measured"],
)
def test_a_version_must_be_right_on_the_reference_set(
    ask: Ask, worst: dict[str, Worst] | None, passes: bool
) -> None:
    gate = ask(sets=[SetResult("big.safetensors", V3, "aoti", worst)])["reference set"]
    assert gate.passed is passes
    assert "aoti beside the portable program on big.safetensors" in gate.detail


@pytest.mark.parametrize(
    ("time", "passes"), [(None, False), (DAY / 2, False), (DAY, True), (DAY * 2, True)], ids=str
)
def test_a_version_must_have_been_in_staging_for_a_time(
    ask: Ask, time: timedelta | None, passes: bool
) -> None:
    gate = ask(in_staging=time, min_time_in_staging=DAY)["staging"]
    assert gate.passed is passes
    assert "24 h" in gate.detail


@pytest.mark.parametrize(
    ("approved_by", "missing"),
    [([], "missing: Ada, Bob"), (["Ada"], "missing: Bob"), (["Bob", "Ada", "Eve"], "")],
    ids=["nobody", "one", "both and another"],
)
def test_all_whom_a_policy_names_must_approve(
    ask: Ask, approved_by: list[str], missing: str
) -> None:
    gate = ask(approvals=("Ada", "Bob"), approved_by=approved_by)["approvals"]
    assert gate.passed is (missing == "")
    assert ("missing" in gate.detail) is (missing != "")
    assert missing in gate.detail


def test_a_trusted_signature_passes(ask: Ask) -> None:
    assert ask(signature=SignatureCheck("ab", found="ab"))["signature"].passed


def test_a_missing_signature_is_refused(ask: Ask) -> None:
    gate = ask(signature=SignatureCheck("ab", error="not signed"))["signature"]
    assert (gate.passed, gate.detail) == (False, "not signed")


SLOW = Decision("speed", False, "ratio 1.5", "ratio <= 1.1", "ratio 1.5, limit 1.1")
GOOD = Decision("tolerance", True, "outside 0", "outside <= 0", "fine")
ALTERED = Decision("digests", False, "altered", "as sealed", "program.pt2 is altered")


def test_an_override_lets_pass_the_refusals_of_the_named_gates() -> None:
    decisions = override([ALTERED, GOOD, SLOW], ["speed", "tolerance"], "on purpose")
    assert [decision.answer for decision in decisions] == ["REFUSED", "passed", "overridden"]
    assert [decision.override for decision in decisions] == ["", "", "on purpose"]
    assert [decision.lets_pass for decision in decisions] == [False, True, True]


@pytest.mark.parametrize(
    ("gate", "reason", "message"),
    [
        ("digests", "on purpose", "'digests' cannot be overridden"),
        ("sped", "on purpose", "no gate 'sped' was asked; there are: tolerance, speed"),
        ("speed", "", "takes a reason"),
        ("speed", "  ", "takes a reason"),
    ],
)
def test_an_override_takes_a_gate_that_was_asked_and_a_reason(
    gate: str, reason: str, message: str
) -> None:
    with pytest.raises(RegistryError, match=message):
        override([ALTERED, GOOD, SLOW], [gate], reason)


def bits(how: str, digest: str | None, target: str = V3, every: bool = False) -> Bits:
    """What a way of running gave; without a digest, it was not measured."""
    return Bits(target, "aoti", how, digest, "" if digest else "it is not here", every)


@pytest.mark.parametrize(
    ("measured", "passes", "detail"),
    [
        ([bits("here", "a"), bits("on another", "a")], True, "the same bits in 2 ways"),
        ([bits("here", "a"), bits("on another", "b")], False, "aoti on another gives other bits"),
        ([bits("here", "a"), bits("with 2 threads", "b", every=True)], True, "the same bits"),
        ([bits("here", "a"), bits("on another", None)], True, "not measured on another: it is not"),
        ([bits("here", None)], False, "not measured (it is not here), the same bits must be shown"),
        ([], False, "not measured (this host does not run it)"),
    ],
)
def test_every_way_of_running_must_give_the_same_bits(
    ask: Ask, measured: list[Bits], passes: bool, detail: str
) -> None:
    decision = ask(reproducible=True, bits=measured)["reproducible"]
    assert decision.passed is passes
    assert detail in decision.detail


def test_the_same_bits_are_no_gate_unless_a_policy_asks(ask: Ask) -> None:
    assert "reproducible" not in ask(bits=[bits("here", "a"), bits("on another", "b")])


@pytest.mark.parametrize(
    ("capture", "found", "detail"),
    [
        ({"dependence": ""}, "shown", "is shown by the program's graph"),
        ({"dependence": "", "tried": "aten.some is unknown"}, "tried", "aten.some is unknown"),
        ({"dependence": "aten.sum works across the rows"}, "not shown", "aten.sum works across"),
        ({}, "not shown", "an older release recorded nothing"),
    ],
)
def test_the_rows_of_a_version_must_be_shown_to_be_independent(
    ask: Ask, capture: dict[str, Any], found: str, detail: str
) -> None:
    version = as_record(Manifest, manifest_data() | {"capture": capture})
    decision = ask(version, shown=True)["independence"]
    assert (decision.passed, decision.found) == (found == "shown", found)
    assert detail in decision.detail


def test_independent_rows_are_no_gate_unless_a_policy_asks(ask: Ask) -> None:
    assert "independence" not in ask()


def between_levels(ask: Ask, digest: str, chosen: str = "aoti") -> Decision:
    """The decision on two levels of CPUs: v3 gives the bits "a", v4 those of its chosen engine."""
    v4 = "cpu/x86-64-v4"
    data = manifest_data()
    aoti = data["targets"][V3]["candidates"]["aoti"]
    data["targets"][v4] = {"status": "verified", "chosen": chosen, "candidates": {chosen: aoti}}
    measured = [bits("here", "a"), bits("here", digest, v4)]
    manifest = as_record(Manifest, data)
    return ask(manifest, targets=(V3, v4), reproducible=True, bits=measured)["reproducible"]


def test_levels_with_the_same_bits_are_reproducible(ask: Ask) -> None:
    assert between_levels(ask, "a").passed


def test_levels_with_other_bits_are_not_reproducible(ask: Ask) -> None:
    assert f"aoti here gives other bits than {V3} here" in between_levels(ask, "b").detail


def test_levels_with_different_engines_are_not_reproducible(ask: Ask) -> None:
    detail = between_levels(ask, "a", chosen="exported").detail
    assert "the levels run different engines" in detail
