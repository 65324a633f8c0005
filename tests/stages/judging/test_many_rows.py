"""Many rows show a rare deviation: near ties are counted, and a rare fault is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor, nn

from runtime.checked import default_tolerance
from runtime.session import Session
from soa import RowRange
from stages.judging.many_rows import compare_on_many_rows, upper_limit_of_share
from stages.reference import Arrays, Edge, MoreRows, bootstrap, make_many_rows, random_inputs
from tests.models import rogues
from tests.models.building import Built, build, signature_of

NAMES = ("near", "far", "first", "second")
SIGNATURE = signature_of({"x": " ".join(NAMES)}, {"y": "y"}, RowRange(0, 1000))
TOLERANCES = {"y": default_tolerance("float32")}
MOST = 20_000


@dataclass(eq=False)
class Nearest(nn.Module):
    """Gives the first value if the near distance is the smaller one, else the second.

    Distances are multiples of 0.7 / 16. Where both are equal, the last bit of the products decides:
    `exactly` computes the near one in another way. `fault`: a rare wrong answer.
    """

    exactly: bool = False
    together: bool = False
    fault: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        steps = (x[:, :2] * 16).round() / 16
        near = steps[:, 0] * 0.7 if self.exactly else steps[:, 0] * 0.1 + steps[:, 0] * 0.6
        chosen = torch.where(near <= steps[:, 1] * 0.7, x[:, 2], x[:, 3])
        if self.together:
            chosen = chosen + 0 * x[:, 2].mean()
        return chosen + torch.where(x[:, 0] > 1.25, 0.01, 0.0) if self.fault else chosen


def pool() -> Arrays:
    """Rows in which no distances are equal, and no fault shows."""
    inputs = random_inputs(SIGNATURE, 1, {})
    rows = inputs["rows"]
    rows["near"], rows["far"] = torch.full((1000,), 1.01), torch.full((1000,), 1.51)
    rows["near"][:2], rows["far"][:2] = torch.tensor([0.8, 1.4]), torch.tensor([1.0, 1.9])
    rows["near"][1] = 1.3
    return inputs


@pytest.fixture(scope="module", params=[False, True], ids=["each row alone", "rows together"])
def eager(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The model, whose rows see each other or not, built with its reference on `pool`."""
    model = Nearest(together=request.param)
    return build(model, SIGNATURE, tmp_path_factory.mktemp("eager"), ("exported",), pool())


@pytest.fixture(scope="module")
def many(eager: Built) -> Sequence[Edge]:
    """Many rows, drawn from those of the reference, with the model's answers."""
    more = make_many_rows(eager.model, SIGNATURE, pool(), MOST)
    assert more.edges and more.notes == ()
    return more.edges


def session_of(model: nn.Module) -> Session:
    """A session that runs the model uncompiled."""
    return Session(SIGNATURE, rogues.uncompiled(model, SIGNATURE))


def test_near_ties_are_counted_and_no_reason_to_refuse(eager: Built, many: Sequence[Edge]) -> None:
    tried = compare_on_many_rows(
        session_of(Nearest(exactly=True)), many, TOLERANCES, eager.capture.program
    )
    assert tried.refusal == ""
    record = tried.record
    assert record.rows >= MOST and 1e-4 < record.outside / record.rows < 0.05
    assert record.outside / record.rows < record.below < 2 * record.outside / record.rows
    looked_at = record.artifact + record.eager + record.neither
    assert 0 < looked_at <= record.outside and record.artifact + record.eager > 0


def test_a_rare_fault_is_refused(eager: Built, many: Sequence[Edge]) -> None:
    tried = compare_on_many_rows(
        session_of(Nearest(fault=True)), many, TOLERANCES, eager.capture.program
    )
    record = tried.record
    assert "'y'" in tried.refusal and 0 < record.outside < record.rows / 10
    assert record.eager > 0 == record.artifact


def test_the_model_itself_is_never_outside(eager: Built, many: Sequence[Edge]) -> None:
    tried = compare_on_many_rows(eager.session("exported"), many, TOLERANCES, eager.capture.program)
    assert (tried.record.outside, tried.refusal) == (0, "")
    assert tried.record.below < 3.1 / tried.record.rows


@pytest.mark.parametrize(("outside", "tried"), [(0, 200_000), (1, 50), (30, 200_000), (7, 7)])
def test_the_bound_is_that_of_clopper_and_pearson(outside: int, tried: int) -> None:
    expected = 1.0 if outside == tried else stats.beta.ppf(0.95, outside + 1, tried - outside)
    assert upper_limit_of_share(outside, tried) == pytest.approx(expected, rel=1e-6)


def test_rows_are_like_those_of_the_reference(many: Sequence[Edge]) -> None:
    own = pool()["rows"]
    for edge in many[:3]:
        for name, values in edge.inputs["rows"].items():
            assert own[name].min() <= values.min() and values.max() <= own[name].max()
            assert values.unique().numel() > 100


def test_much_work_for_a_row_means_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is counted, so the number of rows is the same each time."""
    monkeypatch.setattr(bootstrap, "_WORK", 1e5)
    first = make_many_rows(Nearest(), SIGNATURE, pool(), None)
    again = make_many_rows(Nearest(), SIGNATURE, pool(), None)
    assert 0 < len(first.edges) == len(again.edges) < MOST // 1000


FEW = signature_of({"x": " ".join(NAMES)}, {"y": "y"}, RowRange(1, 3))


def test_a_model_that_takes_few_rows_at_a_time_gets_five_hundred_runs() -> None:
    assert len(make_many_rows(Nearest(), FEW, random_inputs(FEW, 1, {}), None).edges) == 500


def test_a_user_sets_the_number_of_rows() -> None:
    more = make_many_rows(Nearest(), FEW, random_inputs(FEW, 1, {}), 300)
    assert sum(edge.case["n"] for edge in more.edges) == 300


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


def test_a_model_that_fails_is_noted() -> None:
    more = make_many_rows(Failing(), SIGNATURE, pool(), MOST)
    assert more.edges == () and len(more.notes) == 1


def test_a_model_is_not_run_for_no_rows() -> None:
    assert make_many_rows(Failing(), SIGNATURE, pool(), 0) == MoreRows()
