"""Rows that see each other are found out; rows that do not are merged."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from runtime.checked.comparison import default_tolerance
from serving.triton.merging import rows_are_independent
from soa import Signature
from tests.models import mlps, served
from tests.models.building import build, mlp_signature

MODELS: dict[str, tuple[type[nn.Module], Signature, bool]] = {
    "a perceptron": (mlps.PointwiseFirst, mlp_signature(), True),
    "every dtype": (served.Mixed, served.MIXED, True),
    "a softmax over rows": (served.Coupled, served.COUPLED, False),
    "only what came before": (served.Running, served.COUPLED, False),
    "scalars": (served.Event, served.EVENT, False),
}


@pytest.mark.parametrize("name", MODELS)
def test_whether_rows_may_share_a_run(name: str, tmp_path: Path) -> None:
    model, signature, expected = MODELS[name]
    made = build(model(), signature, tmp_path, ("exported",), route="none")
    tolerances = {b.name: default_tolerance(b.plan.dtypes[0]) for b in signature.outputs}
    session = made.session("exported")
    assert rows_are_independent(session, made.inputs, tolerances) is expected
