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
from stages.reference import Arrays, Reference, make_stress_rows, random_inputs
from stages.reports import ValidationReport
from tests.models import rogues
from tests.models.building import Built, build, signature_of, tolerances_of

SIGNATURE = signature_of({"x": "a b c d e f"}, {"y": "y", "m": "m:int32"}, storage="columns")
TOLERANCES = tolerances_of(SIGNATURE)


def inputs(**columns: float) -> Arrays:
    """Random rows, in which the named columns have one value."""
    rows = random_inputs(SIGNATURE, 1, {})
    for name, value in columns.items():
        rows["rows"][name] = torch.full_like(rows["rows"][name], value)
    return rows


PADDED = inputs(e=0.0, f=0.0)


@dataclass(eq=False)
class Network(nn.Module):
    """Several operations, of which one may be `wrong`: as a faulty engine computes it."""

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
        last = x[:, 5] * (0.5 if self.wrong == "a constant column" else 1.0)
        classes = torch.bucketize(x[:, 0].contiguous(), torch.tensor([-0.7, 0.3, 0.9]))
        if self.wrong == "the class of NaN":
            classes = torch.where(x[:, 0].isnan(), 0, classes)
        picked = torch.tensor([1.0, 2.0, 3.0, 4.0])[classes]
        return pooled.sum(1) + most[:, 0] + last + picked, classes.to(torch.int32)


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The right network, whose reference has padded rows only."""
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
        answers = Network(wrong)(torch.stack([v[: case["n"]] for v in PADDED["rows"].values()], 1))
        assert torch.allclose(answers[0], outputs["y"].reshape(-1), 1e-5, 1e-5)  # the file is blind
    report = judged(eager, Network(wrong))
    assert (report.valid, report.code) == (False, "candidate-edge")


class Pooled(nn.Module):
    """A pool whose last window is shorter than the others, and a class."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pooled = F.avg_pool1d(x[:, None], 3, 2, ceil_mode=True)
        return pooled.sum((1, 2)), (x[:, 0] > 0).to(torch.int32)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """An artifact of `lanes` whose divisor of a window counts an element beyond the row's end."""
    monkeypatch.setattr(pooling, "_clip_to_input", lambda windows, x, room=None: windows)
    return build(Pooled(), SIGNATURE, tmp_path, ("lanes",), PADDED)


def test_a_fault_of_an_engine_is_refused_by_stress_rows(faulty: Built) -> None:
    """Without them it is valid."""
    session = faulty.session("lanes")
    reference = Reference.load(faulty.capture.reference, SIGNATURE)
    without = replace(reference, edges=())
    assert validate_session(session, "lanes", without, TOLERANCES).valid
    program = faulty.capture.program
    report = validate_session(session, "lanes", reference, TOLERANCES, program=program)
    assert (report.valid, report.code) == (False, "candidate-edge")


def test_another_class_at_nan_is_refused(eager: Built) -> None:
    report = judged(eager, Network("the class of NaN"))
    assert report.code == "candidate-edge" and report.reason is not None
    assert "NaN" in report.reason


class Cleaned(nn.Module):
    """Gives a number where the network gives NaN."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, m = Network()(x)
        return y.nan_to_num(0.0), m


def require_noted_or_refused(eager: Built, other: nn.Module) -> None:
    """A report notes NaN; if the user asks for it, special values refuse the artifact."""
    noted = judged(eager, other)
    assert noted.valid and "NaN" in noted.edges
    refused = judged(eager, other, "refuse")
    assert (refused.valid, refused.code) == (False, "candidate-edge")


def test_a_number_in_place_of_nan_is_noted_or_refused(eager: Built) -> None:
    require_noted_or_refused(eager, Cleaned())


class Following(nn.Module):
    """Gives a number and another class where the network gives NaN: ONNX Runtime's Relu of NaN is
    0, and the largest of the probabilities then another one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, m = Network()(x)
        return y.nan_to_num(0.0), torch.where(y.isnan(), 1 - m, m)


def test_a_class_that_follows_from_nan_is_noted_or_refused(eager: Built) -> None:
    """It is no decision of its own."""
    require_noted_or_refused(eager, Following())


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


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The model that loses digits, and its reference."""
    return build(Lossy(), SIGNATURE, tmp_path_factory.mktemp("lossy"), ("exported",))


@pytest.mark.parametrize("with_program", [False, True])
def test_what_the_model_itself_loses_is_no_reason_to_refuse(
    lossy: Built, with_program: bool
) -> None:
    """Without the program nothing shows that the model itself is not sure."""
    reference = Reference.load(lossy.capture.reference, SIGNATURE)
    alone = replace(reference, cases=(), outputs=(), edges=reference.edges[:4])
    other = Session(SIGNATURE, rogues.uncompiled(Otherwise(), SIGNATURE))
    program = lossy.capture.program if with_program else None
    report = validate_session(other, "other", alone, TOLERANCES, program=program)
    assert report.valid == with_program


class Positive(nn.Module):
    """Fails for a value of column f that its table does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x[:, 5].long(), torch.eye(3))[:, 0] + x[:, 0]


def test_columns_in_which_the_model_takes_no_other_values_keep_theirs() -> None:
    rows = inputs()
    rows["rows"]["f"] = torch.arange(100.0) % 3
    signature = signature_of({"x": "a b c d e f"}, {"y": "y"})
    stress = make_stress_rows(Positive().eval(), signature, rows)
    assert stress.edges and any("rows.f" in note for note in stress.notes)
    for edge in stress.edges:
        assert edge.kind == "stress" and edge.inputs["rows"]["a"].unique().numel() > 32


class Sum(nn.Module):
    def forward(self, x: Tensor, k: Tensor, b: Tensor) -> Tensor:
        return (x + k + b)[:, 0]


@pytest.fixture(scope="module")
def of_sum() -> list[dict[str, Tensor]]:
    """The stress rows of a column of zeros (x), of integers from 3 to 9 (k) and of bools (b)."""
    signature = signature_of({"x": "x", "k": "k:int32", "b": "b:bool"}, {"y": "y"})
    rows = random_inputs(signature, 1, {"k": (3, 9)})["rows"]
    rows |= {"x": torch.zeros(100), "b": torch.zeros(100, dtype=torch.bool)}
    stress = make_stress_rows(Sum(), signature, {"rows": rows})
    assert len(stress.edges) == 4 and stress.notes == ()
    return [edge.inputs["rows"] for edge in stress.edges]


def test_a_column_of_zeros_varies_in_stress_rows(of_sum: list[dict[str, Tensor]]) -> None:
    for rows in of_sum:
        assert rows["x"].unique().numel() > 32 and rows["x"].isfinite().all()
    assert any(bool((rows["x"] < 0).any()) for rows in of_sum)


def test_integers_vary_in_the_range_of_the_file(of_sum: list[dict[str, Tensor]]) -> None:
    for rows in of_sum:
        assert rows["k"].min() >= 3 and rows["k"].max() <= 9 and rows["k"].unique().numel() > 3


def test_bools_take_both_values_in_stress_rows(of_sum: list[dict[str, Tensor]]) -> None:
    assert all(rows["b"].unique().numel() == 2 for rows in of_sum)
