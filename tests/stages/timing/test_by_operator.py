"""The shares of each line of a model in a call of `lanes`."""

from __future__ import annotations

import pytest

from stages.reference import Case
from stages.timing import operator_times
from tests.models.building import Built


def test_each_line_has_its_share(mlp: Built) -> None:
    cases: list[Case] = [{"n": 1}, {"n": 500}]
    found = operator_times(mlp.capture.program, mlp.signature, mlp.inputs, cases)
    for size in ("n=1", "n=500"):
        assert sum(each.shares[size] for each in found) == pytest.approx(1)
    layers = [each for each in found if each.operator == "addmm"]  # both stand in one line
    assert [each.line.partition(" ")[2] for each in layers] == ["first", "last"]
    assert all(share > 0 for each in layers for share in each.shares.values())
