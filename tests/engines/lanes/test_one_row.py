"""Networks that compute something else for one row than for many.

The graph shows this, and `lanes` is not applicable. These tests ignore the graph: validation at
many n also refuses each of them, so it is never skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines import Portable, Target, engine
from engines.lanes.planning import program
from runtime.checked import default_tolerance
from runtime.session.session import Session
from stages.capture import Capture, capture
from stages.judging.validate import validate_session
from stages.reference.answers import Reference, random_inputs
from stages.reports import ValidationReport
from tests.models.building import mlp_signature


class FromTheMean(nn.Module):
    """For one row alone, the answer is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] - x[:, :3].mean(0, keepdim=True)


class PerRow(nn.Module):
    """Divides by the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] / x.shape[0]


class OfItsRow(nn.Module):
    """A sum along the row, which depends on no other."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3].cumsum(1)


def validated(
    model: nn.Module, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Capture, ValidationReport]:
    """Validates the program of one row, whatever the graph shows."""
    monkeypatch.setattr(program, "why_dependent", lambda captured: None)
    signature = mlp_signature(highest=100)
    captured = capture(model.eval(), signature, random_inputs(signature, 1, {}), folder, "none")
    out = folder / "lanes"
    out.mkdir()
    lanes, target = engine("lanes"), Target.parse("cpu")
    file, *_ = lanes.compile(Portable(captured.program, None), target, {}, out)
    session = Session(signature, lanes.open(out / file, torch.device("cpu")))
    tolerances = {b.name: default_tolerance("float32") for b in signature.outputs}
    return captured, validate_session(
        session, "lanes", Reference.load(captured.reference), tolerances
    )


@pytest.mark.parametrize("model", [FromTheMean, PerRow])
def test_validation_refuses_what_acts_otherwise_at_many_rows(
    model: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, report = validated(model(), tmp_path, monkeypatch)
    assert captured.dependence
    assert report.verdict == "refused"
    assert report.cases[-1].rows["n"] > 1


def test_validation_takes_what_acts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, report = validated(OfItsRow(), tmp_path, monkeypatch)
    assert not captured.dependence
    assert report.valid
