"""Gates on numbers with bounds: what passes, and the text of a decision."""

from __future__ import annotations

import math
from typing import Any

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
BESIDE = {"beside": "jets/1"}


def decision_on(measured: Measured) -> Decision:
    """The decision of the gate of a number with bounds."""
    manifest = as_record(Manifest, manifest_data())
    decisions = decide(findings(manifest, bounded=[measured]))
    (decision,) = (item for item in decisions if item.gate == measured.gate)
    return decision


def test_there_is_no_gate_where_there_is_no_bound() -> None:
    manifest = as_record(Manifest, manifest_data())
    gates = [decision.gate for decision in decide(findings(manifest))]
    assert not {"latency", "memory", "size", "metrics", "shadow"} & {*gates}


@pytest.mark.parametrize(
    ("bounds", "value", "passes"),
    [
        pytest.param({}, math.nan, False, id="NaN"),
        pytest.param({}, 3.0, True, id="no bound"),
        pytest.param({**BESIDE, "old": 0.95, "max_rise": 0.0}, 0.96, False, id="a rise"),
        pytest.param({**BESIDE, "old": 0.95, "max_rise": 0.01}, 0.955, True, id="a small rise"),
        pytest.param({**BESIDE, "old": math.nan, "max_drop": 0.1}, 0.96, False, id="NaN before"),
        pytest.param({**BESIDE, "old": math.nan, "min": 0.9}, 0.96, True, id="NaN not asked for"),
        pytest.param({"max_drop": 0.01}, 0.1, True, id="no version in place"),
    ],
)
def test_a_number_is_compared_with_its_bounds(
    bounds: dict[str, Any], value: float, passes: bool
) -> None:
    assert decision_on(Measured("metrics", "auc", value, **bounds)).passed is passes


def test_a_refusal_names_the_numbers_and_their_bounds() -> None:
    measured = Measured(
        "metrics", "auc on cpu", 0.91, min=0.9, beside="jets/1", old=0.95, max_drop=0.01, why="so"
    )
    decision = decision_on(measured)
    assert decision.detail == "auc on cpu is 0.91; jets/1 has 0.95, limit >= 0.9, drop <= 0.01: so"
    assert (decision.found, decision.limit) == ("0.91; jets/1 has 0.95", ">= 0.9, drop <= 0.01")


@given(NUMBER, BOUND, BOUND, NUMBER, BOUND)
def test_what_passes_is_finite_and_within_each_bound(
    value: float, least: float | None, most: float | None, old: float, drop: float | None
) -> None:
    measured = Measured(
        "metrics", "m", value, min=least, max=most, beside="jets/1", old=old, max_drop=drop
    )
    inside = (
        math.isfinite(value)
        and (least is None or value >= least)
        and (most is None or value <= most)
        and (drop is None or old - value <= drop)
    )
    assert decision_on(measured).passed is inside
