"""Stress rows refuse what the user's own rows hide, but not what the model itself loses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.lanes.operators import pooling
from runtime.session import Session
from stages.judging import Special
from stages.judging.validate import validate_session
from stages.reference import Arrays, Reference, random_inputs, stress_rows
from stages.reports import ValidationReport
from tests.models import rogues
from tests.models.building import Built, build, signature_of, tolerances_of

SIGNATURE = signature_of({"x": "a b c d e f"}, {"y": "y", "m": "m:int32"}, storage="columns")
TOLERANCES = tolerances_of(SIGNATURE)


def inputs(**columns: float) -> Arrays:
    """Random rows, in which the named columns have one value."""
    found = random_inputs(SIGNATURE, 1, {})
    for name, value in columns.items():
        found["rows"][name] = torch.full_like(found["rows"][name], value)
    return found


PADDED = inputs(e=0.0, f=0.0)


@dataclass(eq=False)
class Network(nn.Module):
    """Several operations; each `wrong` one is as a faulty engine computes it."""

    wrong: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pooled = F.avg_pool1d(x[:, None], 3, 2, ceil_mode=True)[:, 0]
        if self.wrong == "the divisor of a pool":  # the last window has two elements
            pooled = torch.cat([pooled[:, :2], x[:, 4:].sum(1, keepdim=True) / 3], 1)
        start = torch.zeros_like(x[:, :1])
        index = torch.zeros_like(x[:, 4:], dtype=torch.long)
        keep = self.wrong == "a swallowed argument"
        most = start.scatter_reduce(1, index, x[:, 4:], "amax", include_self=keep)
        part = x[:, 5] * (0.5 if self.wrong == "a constant column" else 1.0)
        classes = torch.bucketize(x[:, 0].contiguous(), torch.tensor([-0.7, 0.3, 0.9]))
        if self.wrong == "the class of NaN":
            classes = torch.where(x[:, 0].isnan(), 0, classes)
        picked = torch.tensor([1.0, 2.0, 3.0, 4.0])[classes]
        return pooled.sum(1) + most[:, 0] + part + picked, classes.to(torch.int32)


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("eager")
    return build(Network(), SIGNATURE, folder, ("exported",), PADDED)


def judged(eager: Built, other: nn.Module, special: Special = "report") -> ValidationReport:
    """Validates `other` against the reference of `eager`."""
    return validate_session(
        Session(SIGNATURE, rogues.uncompiled(other, SIGNATURE)), "other",
        Reference.load(eager.capture.reference, SIGNATURE),
        TOLERANCES, program=eager.capture.program, special_values=special,
    )  # fmt: skip


def test_the_model_itself_is_valid(eager: Built) -> None:
    report = judged(eager, Network(), "refuse")
    assert report.valid and report.edges == ()


@pytest.mark.parametrize(
    "wrong", ["the divisor of a pool", "a swallowed argument", "a constant column"]
)
def test_stress_rows_refuse_what_the_file_hides(eager: Built, wrong: str) -> None:
    reference = Reference.load(eager.capture.reference, SIGNATURE)
    for case, outputs in zip(reference.cases, reference.outputs, strict=True):
        found = Network(wrong)(torch.stack([v[: case["n"]] for v in PADDED["rows"].values()], 1))
        assert torch.allclose(found[0], outputs["y"].reshape(-1), 1e-5, 1e-5)  # the file is blind
    report = judged(eager, Network(wrong))
    assert (report.valid, report.code) == (False, "candidate-edge")


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pooled = F.avg_pool1d(x[:, None], 3, 2, ceil_mode=True)
        return pooled.sum((1, 2)), (x[:, 0] > 0).to(torch.int32)


def test_a_fault_of_an_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The divisor of a window counts an element beyond the end of the row."""
    monkeypatch.setattr(pooling, "_inside", lambda windows, x, room=None: windows)
    made = build(Pooled(), SIGNATURE, tmp_path, ("lanes",), PADDED)
    reference = Reference.load(made.capture.reference, SIGNATURE)
    given = made.session("lanes"), "lanes"
    assert validate_session(*given, replace(reference, edges=()), TOLERANCES).valid
    report = validate_session(*given, reference, TOLERANCES, program=made.capture.program)
    assert (report.valid, report.code) == (False, "candidate-edge")


def test_a_decision_at_nan_is_the_models(eager: Built) -> None:
    report = judged(eager, Network("the class of NaN"))
    assert report.code == "candidate-edge" and report.reason is not None
    assert "NaN" in report.reason


class Cleaned(nn.Module):
    """Gives a number where the network gives NaN."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, m = Network()(x)
        return y.nan_to_num(0.0), m


def test_a_number_in_place_of_nan_is_said_or_refused(eager: Built) -> None:
    said = judged(eager, Cleaned())
    assert said.valid and "NaN" in said.edges
    refused = judged(eager, Cleaned(), "refuse")
    assert (refused.valid, refused.code) == (False, "candidate-edge")


class Following(nn.Module):
    """Gives a number and another class where the network gives NaN: ONNX Runtime's Relu of NaN is
    0, and the largest of the probabilities then another one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, m = Network()(x)
        return y.nan_to_num(0.0), torch.where(y.isnan(), 1 - m, m)


def test_a_class_that_follows_from_nan_is_no_decision(eager: Built) -> None:
    said = judged(eager, Following())
    assert said.valid and "NaN" in said.edges
    refused = judged(eager, Following(), "refuse")
    assert (refused.valid, refused.code) == (False, "candidate-edge")


class Lossy(nn.Module):
    """A sum of large numbers, from which their size is taken: float32 leaves two digits."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.total(x + 1e4) - 6e4, torch.zeros_like(x[:, 0], dtype=torch.int32)

    def total(self, x: Tensor) -> Tensor:
        return ((x[:, 0] + x[:, 1]) + (x[:, 2] + x[:, 3])) + (x[:, 4] + x[:, 5])


class Otherwise(Lossy):
    """The same number, summed in another order."""

    def total(self, x: Tensor) -> Tensor:
        return ((((x[:, 5] + x[:, 4]) + x[:, 3]) + x[:, 2]) + x[:, 1]) + x[:, 0]


def test_what_the_model_itself_loses_is_no_reason(tmp_path: Path) -> None:
    """Without the program nothing shows that the model itself is not sure."""
    eager = build(Lossy(), SIGNATURE, tmp_path, ("exported",))
    reference = Reference.load(eager.capture.reference, SIGNATURE)
    alone = replace(reference, cases=(), outputs=(), edges=reference.edges[:4])
    other = Session(SIGNATURE, rogues.uncompiled(Otherwise(), SIGNATURE))
    given = other, "other", alone, TOLERANCES
    assert not validate_session(*given).valid
    assert validate_session(*given, program=eager.capture.program).valid


class Positive(nn.Module):
    """Fails for a value of column f that its table does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x[:, 5].long(), torch.eye(3))[:, 0] + x[:, 0]


def test_columns_in_which_the_model_takes_no_other_values_keep_theirs() -> None:
    rows = inputs()
    rows["rows"]["f"] = torch.arange(100.0) % 3
    one = signature_of({"x": "a b c d e f"}, {"y": "y"})
    found = stress_rows(Positive().eval(), one, rows)
    assert found.edges and any("rows.f" in note for note in found.notes)
    for edge in found.edges:
        assert edge.kind == "stress" and edge.inputs["rows"]["a"].unique().numel() > 32


def test_every_column_varies_and_stays_in_its_range() -> None:
    """Also columns of zeros; integers stay in the range of the file, bools take both values."""
    signature = signature_of({"x": "x", "k": "k:int32", "b": "b:bool"}, {"y": "y"})

    class Sum(nn.Module):
        def forward(self, x: Tensor, k: Tensor, b: Tensor) -> Tensor:
            return (x + k + b)[:, 0]

    rows = random_inputs(signature, 1, {"k": (3, 9)})["rows"]
    rows |= {"x": torch.zeros(100), "b": torch.zeros(100, dtype=torch.bool)}
    found = stress_rows(Sum(), signature, {"rows": rows})
    assert len(found.edges) == 4 and found.notes == ()
    for edge in found.edges:
        values = edge.inputs["rows"]
        assert values["x"].unique().numel() > 32 and values["x"].isfinite().all()
        assert values["k"].min() >= 3 and values["k"].max() <= 9
        assert values["k"].unique().numel() > 3 and values["b"].unique().numel() == 2
    assert any(bool((edge.inputs["rows"]["x"] < 0).any()) for edge in found.edges)
