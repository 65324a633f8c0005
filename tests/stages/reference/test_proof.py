"""What a reference proves: NaN and constants prove nothing; they are refused, counted or noted."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from soa import Block, Layout, RowRange, Signature, column, eigen, scalar
from stages.capture import capture
from stages.errors import CaptureError, ReferenceDataError
from stages.reference.answers import Arrays, Reference, compute_reference, make_cases, random_inputs
from stages.reference.nonfinite import Nonfinite, count_nonfinite, why_too_nonfinite
from stages.reference.proof import find_weaknesses
from tests.models import mlps
from tests.models.building import mlp_signature, signature_of

SIGNATURE = mlp_signature(100)
DRAWN = random_inputs(SIGNATURE, 1, {})


class Model(nn.Module):
    """A model that applies a function to the six features."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def answers(
    function: Callable[[Tensor], Tensor], inputs: Arrays = DRAWN, signature: Signature = SIGNATURE
) -> Reference:
    """The reference of a model that applies a function."""
    return compute_reference(Model(function), signature, inputs, make_cases(signature))


def counted(signature: Signature, reference: Reference) -> tuple[Nonfinite, ...]:
    """The NaN and infinities of each output, by size."""
    return count_nonfinite(signature, reference.cases, reference.outputs)


def with_columns(**values: Tensor) -> Arrays:
    """The drawn inputs with other values in some columns."""
    return {"jets": {**DRAWN["jets"], **values}}


def captured(model: nn.Module, folder: Path, inputs: Arrays = DRAWN, limit: float = 0.0) -> None:
    """Captures a model; `limit` is the share of its reference that may be NaN."""
    capture(model.eval(), SIGNATURE, inputs, folder, "none", nonfinite=limit)


# -- NaN and infinities ------------------------------------------------------------------------


def test_nan_is_counted_by_output_and_size() -> None:
    hole = DRAWN["jets"]["a"].clone()
    hole[[5, 33]] = math.nan
    (nonfinite,) = counted(SIGNATURE, answers(lambda x: x[:, :3], with_columns(a=hole)))
    sizes = {label: bad for label, (bad, _) in nonfinite.by_size.items() if bad}
    assert sizes == {"n=31": 1, "n=32": 1, "n=33": 1, "n=37": 2, "n=100": 2}
    assert "n=0" not in nonfinite.by_size
    assert nonfinite.by_size["n=100"] == (2, 300)
    assert nonfinite.count == 7
    assert nonfinite.share == 7 / nonfinite.values
    assert nonfinite.first == "column 'x', row 5 at n=31"
    assert nonfinite.empty == ""


def test_what_a_float16_column_cannot_hold_is_infinite() -> None:
    half = mlp_signature(100, output="float16")
    (nonfinite,) = counted(half, answers(lambda x: x[:, :3] * 1e9, signature=half))
    assert nonfinite.share > 0.99


def test_integers_are_finite() -> None:
    whole = mlp_signature(100, output="int32")
    (nonfinite,) = counted(whole, answers(lambda x: x[:, :3].int(), signature=whole))
    assert nonfinite.count == 0


@pytest.mark.parametrize(
    ("nonfinite", "limit", "says"),
    [
        (0, 0.0, None),
        (10, 0.1, None),
        (11, 0.1, "11.00% of the reference is NaN or infinite"),
        (1, 0.0, "raise reference: nonfinite"),
        (1, math.nan, "raise reference: nonfinite"),
    ],
)
def test_more_nan_than_the_limit_is_a_refusal(
    nonfinite: int, limit: float, says: str | None
) -> None:
    refusal = why_too_nonfinite([Nonfinite("p", {"n=100": (nonfinite, 100)})], limit)
    if says is None:
        assert refusal is None
    else:
        assert refusal is not None and says in refusal


def logarithm() -> Model:
    """Its answers are NaN for negative inputs."""
    return Model(lambda x: torch.log(x)[:, :3])


@pytest.mark.parametrize("limit", [0.0, 0.01, 0.3])
def test_a_logarithm_of_random_numbers_is_refused(tmp_path: Path, limit: float) -> None:
    """The default inputs do not suit a model that begins with a logarithm."""
    with pytest.raises(ReferenceDataError, match=r"column '[xyz]', row \d+ at n=") as caught:
        captured(logarithm(), tmp_path, limit=limit)
    assert "output 'probabilities'" in str(caught.value)
    assert "reference: ranges" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_logarithm_of_positive_numbers_is_captured(tmp_path: Path) -> None:
    ranges = dict.fromkeys("abcdef", (1.0, 9.0))
    captured(logarithm(), tmp_path, random_inputs(SIGNATURE, 1, ranges))
    assert (tmp_path / "program.pt2").is_file()


def test_where_nothing_is_finite_no_limit_helps() -> None:
    """In the first row, so at n=1; in all rows together the share is small."""
    first = with_columns(a=torch.where(torch.arange(100) < 1, math.nan, DRAWN["jets"]["a"]))
    (nonfinite,) = counted(SIGNATURE, answers(every, first))
    assert nonfinite.share < 0.1
    refusal = why_too_nonfinite([nonfinite], 0.999) or ""
    assert "no value at all is finite at n=1" in refusal
    assert "another reference: seed" in refusal


def test_a_mean_over_no_rows_may_be_nan() -> None:
    layout = Layout([column("x", "float32")])
    signature = Signature.build(
        {"hits": layout, "out": Layout([scalar("mean", "float32")])},
        [Block("x", "hits", ("x",))],
        [Block("mean", "out", ("mean",))],
        {"n": RowRange(0, 50)},
    )
    inputs = random_inputs(signature, 1, {})
    reference = answers(lambda x: x.mean(dim=0), inputs, signature)
    assert reference.outputs[0]["mean"].isnan().all()
    (nonfinite,) = counted(signature, reference)
    assert why_too_nonfinite([nonfinite], 0.0) is None
    assert find_weaknesses(Model(lambda x: x.mean(dim=0)), signature, reference) == ()


# -- inputs without effect, and constant outputs -----------------------------------------------


def noted(function: Callable[[Tensor], Tensor], inputs: Arrays = DRAWN) -> tuple[str, ...]:
    """The notes on a reference of a model with this function."""
    return find_weaknesses(Model(function), SIGNATURE, answers(function, inputs))


class AllButFirst(nn.Module):
    """The sum of all columns but the first; it counts its runs."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x[:, 1:].sum(dim=1, keepdim=True)


def test_a_column_without_effect_among_many_is_found_in_few_runs() -> None:
    """The 299 others need no run of their own."""
    signature = signature_of({"x": " ".join(f"c{i}" for i in range(300))}, {"sum": "sum"})
    inputs = random_inputs(signature, 1, {})
    reference = compute_reference(AllButFirst(), signature, inputs, make_cases(signature))
    model = AllButFirst()
    (note,) = find_weaknesses(model, signature, reference)
    assert "rows.c0" in note and "changes no output" in note
    assert 0 < model.runs < 20


def every(x: Tensor) -> Tensor:
    """Each output depends on each input."""
    return x.sum(dim=1, keepdim=True) * torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("function", [every, mlps.PointwiseFirst().core], ids=["sums", "network"])
def test_a_reference_that_shows_everything_has_no_notes(
    function: Callable[[Tensor], Tensor],
) -> None:
    assert noted(function) == ()


@pytest.mark.parametrize(
    ("function", "inputs", "note"),
    [
        (every, {"b": torch.full((100,), 7.0)}, "input column jets.b is the same in every row"),
        (
            lambda x: every(x.nan_to_num()),
            {"d": torch.full((100,), math.nan)},
            "input column jets.d is the same",
        ),
        (every, {"b": DRAWN["jets"]["e"].clone()}, "columns jets.b and jets.e hold the same"),
        (lambda x: every(x[:, :5]), {}, "input column jets.f changes no output"),
        (
            lambda x: torch.cat([every(x)[:, :2], torch.ones(len(x), 1)], dim=1),
            {},
            "output column tags.z is the same in every row at n=100",
        ),
        (
            lambda x: torch.cat([every(x)[:, :2], torch.full((len(x), 1), -math.inf)], dim=1),
            {},
            "output column tags.z is the same in every row at n=100",
        ),
    ],
    ids=["constant", "constant NaN", "two alike", "unread", "constant output", "masked output"],
)
def test_what_does_not_show_is_the_only_note(
    function: Callable[[Tensor], Tensor], inputs: dict[str, Tensor], note: str
) -> None:
    (only,) = noted(function, with_columns(**inputs))
    assert note in only


def test_a_column_that_matters_seldom_is_asked_about_twice() -> None:
    """In the first 32 rows no value exceeds the threshold."""
    rare = DRAWN["jets"]["f"].clone()
    rare[:40], rare[60] = 0.0, 9.0
    assert noted(lambda x: every(x[:, :5]) + (x[:, 5:] > 5), with_columns(f=rare)) == ()


class OneRests(nn.Module):
    """The second output is constant."""

    def forward(self, a: Tensor, run: Tensor) -> tuple[Tensor, Tensor]:
        return a + run, torch.ones(len(a), 2)


def test_an_output_that_no_input_changes_is_noted() -> None:
    layouts = {"jets": Layout([column("a", "float32"), scalar("run", "uint32")]),
               "tags": Layout([column("x", "float32"), eigen("y", "float32", 2)])}  # fmt: skip
    signature = Signature.build(
        layouts,
        [Block("a", "jets", ("a",)), Block("run", "jets", ("run",), "float32")],
        [Block("moves", "tags", ("x",)), Block("rests", "tags", ("y",))],
        {"n": RowRange(0, 50)},
    )
    inputs = random_inputs(signature, 1, {})
    reference = compute_reference(OneRests(), signature, inputs, make_cases(signature))
    (note,) = find_weaknesses(OneRests(), signature, reference)
    assert "output 'rests' is changed by no input" in note


@pytest.mark.parametrize(
    ("function", "inputs", "says"),
    [
        (lambda x: torch.zeros(x.shape[0], 3), DRAWN, "no input changes any output"),
        (every, {"jets": {c: torch.zeros(100) for c in mlps.FEATURES}}, "every row of its inputs"),
    ],
    ids=["constant model", "zeros"],
)
def test_a_reference_that_shows_nothing_is_refused(
    function: Callable[[Tensor], Tensor], inputs: Arrays, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ReferenceDataError, match=says) as caught:
        captured(Model(function), tmp_path, inputs)
    assert "reference: ranges" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_notes_are_printed_and_stored(tmp_path: Path) -> None:
    lines: list[str] = []
    model = Model(lambda x: every(x[:, :5])).eval()
    result = capture(model, SIGNATURE, DRAWN, tmp_path, "none", say=lines.append)
    stored = Reference.load(result.reference)
    assert len(stored.notes) == 1
    assert any(stored.notes[0] in line for line in lines)


def test_an_older_reference_has_no_notes(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    path.write_bytes(save({"output/0/p": torch.zeros(2)}, {"cases": '[{"n": 2}]'}))
    assert Reference.load(path).notes == ()


# -- a model whose answers vary ----------------------------------------------------------------


class Dropping(mlps.Core):
    """Its dropout stays active in every mode."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return self.core(self.drop(x))


class Always(nn.Module):
    """Dropout as a function, which knows no mode."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)


class AsTrained(nn.Dropout):
    """Dropout that puts itself back into train mode."""

    def forward(self, x: Tensor) -> Tensor:
        self.training = True
        return super().forward(x)


class Counting(mlps.Core):
    """Its answers grow with each call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.core(x) * self.calls


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Dropping(Always()), "layer 'drop' (Always)"),
        (Dropping(AsTrained()), "layer 'drop' (AsTrained)"),
        (Counting(), "the model itself"),
    ],
    ids=["functional", "module", "state"],
)
def test_a_model_with_two_answers_is_refused_before_anything_is_made(
    model: nn.Module, says: str, tmp_path: Path
) -> None:
    lines: list[Any] = []
    with pytest.raises(CaptureError) as caught:
        capture(model.eval(), SIGNATURE, DRAWN, tmp_path, say=lines.append)
    text = str(caught.value)
    assert "two answers to the same inputs" in text
    assert says in text
    assert f"{Path(__file__).name}:" in text or "mlps.py:" in text
    assert len(text) < 500
    assert len(lines) == 1
    assert not list(tmp_path.iterdir())


def test_a_scripted_model_with_two_answers_is_refused_by_its_operator(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="bernoulli"):
        captured(torch.jit.script(nn.Sequential(Always(), nn.Linear(6, 3))), tmp_path)
