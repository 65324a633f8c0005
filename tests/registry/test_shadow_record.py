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
    drawn: dict[str, Any] = {name: draw(COUNT) for name in ("events", "dropped", "errors")}
    return replace(BEGUN, **drawn, max_abs=draw(GAPS), max_rel=draw(GAPS))


@given(records())
def test_it_is_read_as_it_was_written(record: ShadowRecord) -> None:
    assert ShadowRecord.from_json(record_to_json(record), "here") == record


@given(records(), records(), records())
def test_the_order_of_sessions_does_not_count(
    a: ShadowRecord, b: ShadowRecord, c: ShadowRecord
) -> None:
    assert a.plus([b, c]) == c.plus([a]).plus([b])
    assert a.plus([b]).events == a.events + b.events
    assert BEGUN.plus([a]) == a


def test_another_bundle_is_left_out() -> None:
    one = replace(BEGUN, events=5)
    others = [replace(one, digest="c" * 64), replace(one, production_digest="c" * 64)]
    assert one.plus(others) == one


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": 3}', "nan"])
def test_what_is_no_record(text: str) -> None:
    with pytest.raises(RegistryError, match="here: not the record of a shadow"):
        ShadowRecord.from_json(text, "here")
