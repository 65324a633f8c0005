"""Extreme values in the reference (infinity, largest integers), and how validation judges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.report.versions import describe_validation
from runtime.session import Session
from stages.judging.validate import validate_session
from stages.reference import Edge, Reference, make_edge_rows, random_inputs
from stages.reports import ValidationReport
from tests.models import rogues
from tests.models.building import Built, build, signature_of, tolerances_of

SIGNATURE = signature_of({"x": "x", "k": "k:int8"}, {"y": "y", "m": "m:int32"}, storage="columns")


@dataclass(eq=False)
class Limited(nn.Module):
    """Passes its inputs on, clamped to limits."""

    x: float = torch.inf
    k: int = 127

    def __post_init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return x.clamp(max=self.x) + 0, k.clamp(-self.k - 1, self.k).to(torch.int32)


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The model without limits, and its reference."""
    return build(Limited(), SIGNATURE, tmp_path_factory.mktemp("eager"), ("exported",))


def judged(eager: Built, **limits: float) -> ValidationReport:
    """Validates a model with limits against the reference of `eager`; ordinary numbers agree."""
    other = rogues.uncompiled(Limited(**limits), SIGNATURE)  # type: ignore[arg-type]
    reference = Reference.load(eager.capture.reference, SIGNATURE)
    session = Session(SIGNATURE, other)
    return validate_session(session, "other", reference, tolerances_of(SIGNATURE))


def test_integers_of_any_size_have_the_models_answers(eager: Built) -> None:
    report = judged(eager, k=100)
    assert not report.valid and report.reason is not None
    assert "'m'" in report.reason and "ranges" in report.reason


def test_floats_that_differ_from_eager_are_said(eager: Built) -> None:
    """The artifact stays valid; the report and its text name the values."""
    report = judged(eager, x=1e18)
    assert report.valid
    assert len(report.edges) == 4  # infinity, and numbers of three sizes
    assert report.edges[0] == "infinity" and all("numbers" in edge for edge in report.edges[1:])
    assert ValidationReport.from_dict(report.to_dict()) == report
    text = "\n".join(p for p in describe_validation("t", [report]) if isinstance(p, str))
    assert report.at_edges in text and "infinity" in text


def test_an_artifact_that_agrees_everywhere_has_no_remark(eager: Built) -> None:
    report = judged(eager)
    assert report.valid and report.edges == () and report.at_edges == ""


@pytest.fixture(scope="module")
def edges(eager: Built) -> Sequence[Edge]:
    """The extreme rows of the reference, each kind by itself."""
    return Reference.load(eager.capture.reference, SIGNATURE).edges


def test_every_kind_of_float_is_in_the_reference(edges: Sequence[Edge]) -> None:
    values = {edge.what: edge.inputs["rows"]["x"].numpy() for edge in edges}
    assert np.isnan(values["NaN"]).all()  # there is one column
    assert (values["infinity"] == np.inf).any() and (values["-infinity"] == -np.inf).any()
    assert np.signbit(values["-0.0"]).any() and not values["-0.0"].any()
    small = np.abs(values["denormal numbers"])
    assert (small[small > 0] < np.finfo(np.float32).tiny).all() and small.any()
    largest = [np.abs(column).max() for column in values.values()]
    assert np.isclose(max(v for v in largest if np.isfinite(v)), np.finfo(np.float32).max)


def test_integers_of_the_whole_range_are_in_the_reference(edges: Sequence[Edge]) -> None:
    (integers,) = [edge for edge in edges if edge.kind == "integers"]
    values = integers.inputs["rows"]["k"]
    assert values.min() == -128 and values.max() == 127 and len(values.unique()) > 8


def test_the_answers_to_extreme_values_are_the_models(edges: Sequence[Edge]) -> None:
    for edge in edges:
        rows = edge.inputs["rows"]
        expected = Limited()(rows["x"][:, None], rows["k"][:, None])
        for name, answer in zip(("y", "m"), expected, strict=True):
            assert torch.equal(edge.outputs[name].nan_to_num(7), answer.nan_to_num(7))


class Index(nn.Module):
    """Takes integers from 0 to 99 only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 1)

    def forward(self, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.table(k.long()[:, 0]), k.to(torch.int32)


def test_integers_that_the_model_does_not_take_are_noted() -> None:
    more = make_edge_rows(Index().eval(), SIGNATURE, random_inputs(SIGNATURE, 1, {}))
    assert not any(edge.exact for edge in more.edges)
    (note,) = more.notes
    assert "integers" in note


def test_integers_that_somebody_chose_stay_as_they_are() -> None:
    inputs = random_inputs(SIGNATURE, 1, {"k": (0, 3)})
    more = make_edge_rows(Index().eval(), SIGNATURE, inputs, stated={"k"})
    assert more.notes == () and not any(edge.exact for edge in more.edges)
    assert all(edge.inputs["rows"]["k"].max() <= 3 for edge in more.edges)
