from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry import Decision, Manifest, SpeedComparison, SpeedPoint, Worst, decide
from registry.promotion.gates import Proof

V3 = "cpu/x86-64-v3"
ROCM = "rocm/gfx90a"
GOOD = {"probabilities": Worst(max_abs=1e-7, max_rel=1e-6, outside=0.0)}


@pytest.fixture
def two_targets(manifest_data: dict[str, Any]) -> Manifest:
    rocm = {
        "status": "unverified",
        "chosen": "aoti",
        "candidates": {"aoti": {"status": "valid", "files": ["targets/rocm/gfx90a/aoti/m.pt2"]}},
    }
    targets = manifest_data["targets"] | {ROCM: rocm, "cuda/sm_90": {"status": "failed"}}
    return Manifest.model_validate(manifest_data | {"targets": targets})


def ask(manifest: Manifest, **changes: Any) -> list[Decision]:
    arguments: dict[str, Any] = {
        "targets": [V3],
        "digest_ok": True,
        "revalidation": {V3: GOOD},
        "proof": Proof(0.0, 0.01, None),
        "speed": None,
        "max_slowdown": 1.1,
        "max_outside": 0.0,
    }
    return decide(manifest, **(arguments | changes))


def refusals(decisions: list[Decision]) -> dict[str, str]:
    return {d.gate: d.detail for d in decisions if not d.passed}


def test_all_pass(manifest: Manifest) -> None:
    decisions = ask(manifest)
    assert [d.gate for d in decisions] == ["digests", "verified", "tolerance", "reference", "speed"]
    assert refusals(decisions) == {}
    assert "no version in place" in decisions[-1].detail


def test_every_gate_is_asked_after_a_refusal(manifest: Manifest) -> None:
    point = SpeedPoint(V3, 1000, new_us=300.0, old_us=200.0)
    decisions = ask(
        manifest,
        digest_ok=False,
        targets=["cpu/x86-64-v4"],
        speed=SpeedComparison("jets/1", (point,)),
    )
    assert set(refusals(decisions)) == {"digests", "verified", "tolerance", "speed"}


def test_a_reference_that_proves_too_little(manifest: Manifest) -> None:
    refused = refusals(ask(manifest, proof=Proof(0.49, 0.01, "output 'p': 49% is NaN")))
    assert refused == {"reference": "output 'p': 49% is NaN"}


def test_no_targets(manifest: Manifest) -> None:
    assert "at least 1" in refusals(ask(manifest, targets=[]))["verified"]


def test_absent_and_failed_targets(two_targets: Manifest) -> None:
    refused = refusals(ask(two_targets, targets=["cpu/none"]))
    assert f"cpu/none is not in the bundle, which has {V3}, {ROCM}" in refused["verified"]
    refused = refusals(ask(two_targets, targets=["cuda/sm_90"]))
    assert refused["verified"] == "cuda/sm_90 is failed, verified is needed"


def test_unverified_passes_only_by_name(two_targets: Manifest) -> None:
    refused = refusals(ask(two_targets, targets=[V3, ROCM]))
    assert set(refused) == {"verified", "tolerance"}
    assert f"{ROCM} is unverified" in refused["verified"]
    allowed = ask(two_targets, targets=[V3, ROCM], allow_unverified=frozenset([ROCM]))
    assert refusals(allowed) == {}
    assert sum("allowed by name" in d.detail for d in allowed) == 2
    others = ask(two_targets, targets=[ROCM], allow_unverified=frozenset([V3]))
    assert "verified" in refusals(others)


def test_allowing_never_excuses_what_was_measured(two_targets: Manifest) -> None:
    bad = {"probabilities": Worst(max_abs=1, max_rel=1, outside=0.5)}
    for target in (ROCM, V3):
        decisions = ask(
            two_targets,
            targets=[target],
            revalidation={target: bad},
            allow_unverified=frozenset([target]),
        )
        assert set(refusals(decisions)) == {"tolerance"}
    failed = ask(
        two_targets, targets=["cuda/sm_90"], allow_unverified=frozenset(["cuda/sm_90", V3])
    )
    assert set(refusals(failed)) == {"verified", "tolerance"}
    verified_not_run = ask(two_targets, revalidation=None, allow_unverified=frozenset([V3]))
    assert set(refusals(verified_not_run)) == {"tolerance"}


def test_tolerance_names_number_and_limit(manifest: Manifest) -> None:
    worst = {"probabilities": Worst(max_abs=0.25, max_rel=0.5, outside=0.125)}
    detail = refusals(ask(manifest, revalidation={V3: worst}))["tolerance"]
    for part in (V3, "probabilities", "0.125", "atol 1e-05 rtol 0.0001", "limit 0", "0.25"):
        assert part in detail


def test_the_stricter_limit_counts(manifest_data: dict[str, Any]) -> None:
    worst = {"probabilities": Worst(max_abs=0.1, max_rel=0.1, outside=0.01)}
    for stored, asked, passes in [(0.02, 0.02, True), (0.0, 0.02, False), (0.02, 0.0, False)]:
        manifest_data["tolerances"]["probabilities"]["max_outside"] = stored
        manifest = Manifest.model_validate(manifest_data)
        refused = refusals(ask(manifest, revalidation={V3: worst}, max_outside=asked))
        assert ("tolerance" not in refused) is passes


@pytest.mark.parametrize("revalidation", [None, {}, {V3: None}, {V3: {}}])
def test_not_run_again(manifest: Manifest, revalidation: Any) -> None:
    refused = refusals(ask(manifest, revalidation=revalidation))
    assert "was not run again" in refused["tolerance"]


def test_output_that_was_not_compared(manifest: Manifest) -> None:
    refused = refusals(ask(manifest, revalidation={V3: {"other": GOOD["probabilities"]}}))
    assert "output probabilities was not compared" in refused["tolerance"]


def test_nan_passes_nothing(manifest: Manifest) -> None:
    nan = {"probabilities": Worst(max_abs=math.nan, max_rel=math.nan, outside=math.nan)}
    assert "tolerance" in refusals(ask(manifest, revalidation={V3: nan}, max_outside=1.0))
    points = (SpeedPoint(V3, 10, math.nan, 1.0), SpeedPoint(V3, 1000, 1.0, 1.0))
    assert "speed" in refusals(ask(manifest, speed=SpeedComparison("jets/1", points)))
    zero = SpeedComparison("jets/1", (SpeedPoint(V3, 10, 1.0, 0.0),))
    assert "speed" in refusals(ask(manifest, speed=zero))


def test_speed_names_the_worst_point(manifest: Manifest) -> None:
    points = (SpeedPoint(V3, 10, 9.0, 10.0), SpeedPoint(V3, 1000, 300.0, 200.0))
    detail = refusals(ask(manifest, speed=SpeedComparison("jets/1", points)))["speed"]
    for part in (f"{V3} at n=1000", "300 us", "200 us of jets/1", "ratio 1.5", "limit 1.1"):
        assert part in detail
    assert refusals(ask(manifest, speed=SpeedComparison("jets/1", points), max_slowdown=1.5)) == {}


def test_speed_not_measured_beside_the_version_in_place(manifest: Manifest) -> None:
    refused = refusals(ask(manifest, speed=SpeedComparison("jets/1", ())))
    assert "not measured beside jets/1" in refused["speed"]


@given(
    ratio=st.floats(0.1, 10.0),
    outside=st.floats(0.0, 1.0),
    max_slowdown=st.floats(0.1, 10.0),
    max_outside=st.floats(0.0, 1.0),
)
def test_limits(ratio: float, outside: float, max_slowdown: float, max_outside: float) -> None:
    manifest = Manifest.model_validate(
        {
            "name": "m",
            "signature": {},
            "capture": {},
            "provenance": {"created": "", "config_sha256": "", "config": {}, "python": ""},
        }
    )
    speed = SpeedComparison("m/1", (SpeedPoint(V3, 1, ratio, 1.0),))
    worst = {V3: {"y": Worst(max_abs=0, max_rel=0, outside=outside)}}
    decisions = decide(
        manifest,
        targets=[V3],
        digest_ok=True,
        revalidation=worst,
        proof=Proof(0.0, 0.01, None),
        speed=speed,
        max_slowdown=max_slowdown,
        max_outside=max_outside,
    )
    passed = {d.gate: d.passed for d in decisions}
    assert passed["speed"] is (ratio <= max_slowdown)
    assert passed["tolerance"] is (outside <= max_outside)
