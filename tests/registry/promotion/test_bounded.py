"""Gates on numbers with bounds: what passes, and the text of a decision."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry import Decision, Manifest
from registry.promotion import Measured, decide
from soa.records import as_record
from tests.models.bundles import manifest_data
from tests.models.findings import findings

NUMBER = st.floats(allow_nan=True, allow_infinity=True)
BOUND = st.none() | st.floats(-1e6, 1e6)


def asked(one: Measured) -> Decision:
    manifest = as_record(Manifest, manifest_data())
    (decision,) = [d for d in decide(findings(manifest, bounded=[one])) if d.gate == one.gate]
    return decision


def test_nobody_asks_where_there_is_no_bound() -> None:
    manifest = as_record(Manifest, manifest_data())
    gates = [d.gate for d in decide(findings(manifest))]
    assert not {"latency", "memory", "size", "metrics", "shadow"} & {*gates}


@pytest.mark.parametrize(
    ("bounds", "value", "passes"),
    [
        ({}, math.nan, False),
        ({}, 3.0, True),
        ({"beside": "jets/1", "old": 0.95, "max_rise": 0.0}, 0.96, False),
        ({"beside": "jets/1", "old": 0.95, "max_rise": 0.01}, 0.955, True),
        ({"beside": "jets/1", "old": math.nan, "max_drop": 0.1}, 0.96, False),
        ({"beside": "jets/1", "old": math.nan, "min": 0.9}, 0.96, True),
        ({"max_drop": 0.01}, 0.1, True),  # no version in place
    ],
)
def test_bounds(bounds: dict[str, float], value: float, passes: bool) -> None:
    assert asked(Measured("metrics", "auc", value, **bounds)).passed is passes  # type: ignore[arg-type]


def test_a_refusal_names_all_there_is_to_know() -> None:
    one = Measured("metrics", "auc on cpu", 0.91, 0.9, None, "jets/1", 0.95, 0.01, why="so")
    decision = asked(one)
    assert decision.detail == "auc on cpu is 0.91; jets/1 has 0.95, limit >= 0.9, drop <= 0.01: so"
    assert (decision.found, decision.limit) == ("0.91; jets/1 has 0.95", ">= 0.9, drop <= 0.01")


@given(NUMBER, BOUND, BOUND, NUMBER, BOUND)
def test_what_passes_is_finite_and_within_each_bound(
    value: float, least: float | None, most: float | None, old: float, drop: float | None
) -> None:
    one = Measured("metrics", "m", value, least, most, "jets/1", old, drop)
    inside = (
        math.isfinite(value)
        and (least is None or value >= least)
        and (most is None or value <= most)
        and (drop is None or old - value <= drop)
    )
    assert asked(one).passed is inside
