"""The record of a shadow: sums over sessions, and which values are left out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.bundle import record_to_json
from registry.errors import RegistryError
from registry.shadow_record import ShadowRecord

BEGUN = ShadowRecord(
    version="jets/2", digest="b" * 64, production="jets/1", production_digest="a" * 64
)
COUNT = st.integers(0, 10**12)
GAPS = st.dictionaries(st.sampled_from("xyz"), st.floats(0, math.inf))


@st.composite
def records(draw: st.DrawFn) -> ShadowRecord:
    counts: dict[str, Any] = {name: draw(COUNT) for name in ("events", "dropped", "errors")}
    return replace(BEGUN, **counts, max_abs=draw(GAPS), max_rel=draw(GAPS))


@given(records())
def test_a_record_is_read_as_it_was_written(record: ShadowRecord) -> None:
    assert ShadowRecord.from_json(record_to_json(record), "here") == record


@given(records(), records(), records())
def test_the_order_of_sessions_does_not_count(
    first: ShadowRecord, second: ShadowRecord, third: ShadowRecord
) -> None:
    assert first.plus([second, third]) == third.plus([first]).plus([second])


@given(records(), records())
def test_the_events_of_sessions_add_up(first: ShadowRecord, second: ShadowRecord) -> None:
    assert first.plus([second]).events == first.events + second.events


@given(records())
def test_a_session_without_events_adds_nothing(record: ShadowRecord) -> None:
    assert BEGUN.plus([record]) == record


@pytest.mark.parametrize("field", ["digest", "production_digest"])
def test_another_bundle_is_left_out(field: str) -> None:
    record = replace(BEGUN, events=5)
    other_digest: dict[str, Any] = {field: "c" * 64}
    assert record.plus([replace(record, **other_digest)]) == record


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": 3}', "nan"])
def test_text_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(RegistryError, match="here: not the record of a shadow"):
        ShadowRecord.from_json(text, "here")
