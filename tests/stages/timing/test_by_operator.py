"""The shares of each line of a model in a call of `lanes`."""

from __future__ import annotations

import pytest

from stages.reference import Case
from stages.timing import time_operators
from tests.models.building import Built


def test_the_shares_of_the_lines_are_a_call(mlp: Built) -> None:
    cases: list[Case] = [{"n": 1}, {"n": 500}]
    times = time_operators(mlp.capture.program, mlp.signature, mlp.inputs, cases)
    for size in ("n=1", "n=500"):
        assert sum(time.shares[size] for time in times) == pytest.approx(1)
    layers = [time for time in times if time.operator == "addmm"]  # both stand in one line
    assert [layer.line.partition(" ")[2] for layer in layers] == ["first", "last"]
    assert all(share > 0 for layer in layers for share in layer.shares.values())
