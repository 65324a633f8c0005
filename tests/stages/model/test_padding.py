"""Jagged rows are padded inside the graph as Awkward pads them, the same in every engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.loading import load
from runtime.checked import Tolerance
from runtime.session.session import Session
from soa import Block, Layout, RowRange, Signature, column
from soa.layout import Column, Storage
from soa.signature import offsets_layout
from stages.errors import CaptureError
from stages.judging.validate import validate_session
from stages.model.fronts.expressions import Expression, Features, Operation
from stages.model.fronts.padding import Padded, Padding
from stages.model.fronts.preprocess import Preprocessed
from stages.model.precision import in_precision
from stages.reference.answers import Reference, random_inputs
from stages.reference.offsets import pad_row_by_row
from tests.models import project, rogues
from tests.models.building import ENGINES, Built, build, reasons, require_valid

LENGTH = 6


class Echo(nn.Module):
    """Returns its inputs."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs


def padded_both_ways(
    paddings: list[int | Padding], *blocks: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The padded inputs, by the code of the graph and by that of the reference."""
    model = Padded(Echo(), paddings)
    return list(model(*blocks)), list(pad_row_by_row(model)(*blocks))


@given(
    counts=st.lists(st.integers(0, 9), max_size=12),
    length=st.integers(1, 7),
    value=st.sampled_from([0.0, -1.5]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    random=st.randoms(),
)
def test_padding_is_awkwards(
    counts: list[int], length: int, value: float, dtype: torch.dtype, random: Any
) -> None:
    """Of two features, of which the second is the first with its sign changed, in six forms."""
    array = ak.unflatten(
        np.arange(1.0, sum(counts) + 1, dtype=np.float32), np.array(counts, np.int64)
    )
    ends = np.cumsum([0, *counts])
    rows = random.sample(range(len(counts)), len(counts))  # in any order, as in Awkward
    offsets = torch.tensor([[ends[row], ends[row + 1]] for row in rows], dtype=dtype).reshape(-1, 2)
    flat = torch.arange(1.0, sum(counts) + 1)
    items = torch.stack([flat, -flat], dim=1)
    in_order = array[np.array(rows, np.int64)]
    filled = ak.fill_none(ak.pad_none(in_order, length, clip=True), value)
    first = torch.from_numpy(ak.to_numpy(filled).astype(np.float32)).reshape(-1, length)
    exists = torch.arange(length) < torch.tensor(counts)[rows].unsqueeze(1)
    second = torch.where(exists, -first, value)
    for features_first, items_first, mask, flat_mask, passed, vector in padded_both_ways(
        [
            Padding(1, length, 0, value),
            Padding(1, length, 0, value, (length, 2)),
            Padding(1, length, None),
            Padding(1, length, None, 0.0, (length,), "bool"),
            0,
            Padding(1, length, 2, value, (length,)),
        ],
        items,
        offsets,
        flat.unsqueeze(1),
    ):
        assert torch.equal(features_first, torch.stack([first, second], dim=1))
        assert torch.equal(items_first, torch.stack([first, second], dim=2))
        assert torch.equal(mask, exists.unsqueeze(1).float())
        assert torch.equal(flat_mask, exists)
        assert passed is items
        assert torch.equal(vector, first)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
def test_items_keep_their_dtype_and_shape(dtype: torch.dtype) -> None:
    items = torch.tensor([[[1, 0]], [[1, 1]], [[0, 1]]]).to(dtype)
    offsets = torch.tensor([[0, 2], [3, 3], [2, 3]])
    for (padded,) in padded_both_ways([Padding(1, 3, 0)], items, offsets):
        assert padded.dtype == dtype and padded.shape == (3, 1, 2, 3)
        assert padded.long().tolist() == [
            [[[1, 1, 0], [0, 1, 0]]],
            [[[0, 0, 0], [0, 0, 0]]],
            [[[0, 0, 0], [1, 0, 0]]],
        ]


# Offsets of a row, where there are three items: negative, descending, beyond, and the extremes.
WRONG = [(-1, 2), (2, 1), (0, 4), (5, 9), (-(2**63), 2**63 - 1), (2**63 - 1, -(2**63))]


@pytest.mark.parametrize("begin, end", WRONG)
def test_a_row_with_wrong_offsets_has_no_items_and_spoils_no_other(begin: int, end: int) -> None:
    items = torch.tensor([[1.0], [2.0], [3.0]])
    offsets = torch.tensor([[0, 2], [begin, end], [2, 3]])
    model = Padded(Echo(), [Padding(1, 2, 0)])
    (padded,) = model(items, offsets)
    assert padded.tolist() == [[[1, 2]], [[0, 0]], [[3, 0]]]
    with pytest.raises(CaptureError):  # no reference has such offsets
        pad_row_by_row(model)(items, offsets)
    (integers,) = model(items.long(), offsets)
    assert integers.tolist() == padded.tolist()


# -- inside an artifact ----------------------------------------------------------------------------


class Sets(nn.Module):
    """(n, 3, LENGTH), (n, LENGTH), (n, 1) -> (n, 2): a sum and a maximum over the existing items.

    Padding does not enter the answer: `torch.where` removes it, as docs/reference/config.md says.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.each, self.last = nn.Conv1d(3, 8, 1), nn.Linear(17, 2)

    def forward(self, jets: Tensor, exists: Tensor, energy: Tensor) -> Tensor:
        hidden = torch.relu(self.each(jets))
        hidden = torch.where(exists.unsqueeze(1), hidden, 0.0)
        pooled = [hidden.sum(dim=2), hidden.amax(dim=2)]
        scores: Tensor = self.last(torch.cat([*pooled, energy], dim=1))
        return scores


JETS = [column("pt", "float32"), column("eta", "float32"), column("charge", "int8")]
PADDED: list[int | Padding] = [
    Padding(2, LENGTH, 0, 0.25),
    Padding(2, LENGTH, None, 0.0, (LENGTH,), "bool"),
    1,
]
LOG = Features(
    (("pt", ()), ("eta", ()), ("charge", ())),
    (
        Expression("pt", (Operation("log"),)),
        Expression("eta"),
        Expression("charge", (Operation("multiply", operand=Expression("eta")),)),
    ),
    "pt",
    0.25,
)


def signature(storage: Storage = "columns", events: int = 70, jets: int = 500) -> Signature:
    """Jagged jets and a number per event in, two scores per event out; at most so many rows."""
    return Signature.build(
        {
            "jets": Layout(JETS, 64 if storage == "buffer" else 1, storage),
            "events": Layout([column("energy", "float32")]),
            "jets_offsets": offsets_layout(),
            "scores": Layout([column("a", "float32"), column("b", "float32")]),
        },
        [
            Block("jets", "jets", ("pt", "eta", "charge"), "float32"),
            Block("energy", "events", ("energy",)),
            Block("jets_offsets", "jets_offsets", ("begin", "end")),
        ],
        [Block("scores", "scores", ("a", "b"))],
        {"n": RowRange(0, events), "jet": RowRange(0, jets)},
        {"jets": "jet"},
        jagged={"jets": LENGTH},
    )


def model() -> nn.Module:
    """`Sets` on the logarithms of padded jets, as an artifact computes it from the blocks."""
    return Preprocessed(Padded(Sets().eval(), PADDED), (LOG, None, None))


def by_awkward(inputs: dict[str, dict[str, Tensor]], n: int, m: int) -> Tensor:
    """The network's answers on n rows of `inputs` with m jets, which Awkward padded."""
    jets, offsets = inputs["jets"], inputs["jets_offsets"]
    begin, end = (offsets[key][:n].clamp(max=m).numpy() for key in ("begin", "end"))
    pt, eta, charge = (jets[name][:m].float() for name in ("pt", "eta", "charge"))
    columns = [torch.where(pt > 0, f, 0.25) for f in (pt.log(), eta, charge * eta)]
    content = ak.contents.RecordArray([ak.contents.NumpyArray(f.numpy()) for f in columns], None)
    starts, stops = ak.index.Index64(begin), ak.index.Index64(end)
    rows = ak.pad_none(ak.Array(ak.contents.ListArray(starts, stops, content)), LENGTH, clip=True)
    padded = [ak.to_numpy(ak.fill_none(rows[str(k)], 0.25)) for k in range(3)]
    exists = torch.from_numpy(end - begin).unsqueeze(1) > torch.arange(LENGTH)
    features = torch.from_numpy(np.stack(padded, axis=1).astype(np.float32))
    with torch.no_grad():
        scores: Tensor = Sets()(features, exists, inputs["events"]["energy"][:n].unsqueeze(1))
    return scores


SOME_ENGINES = tuple(name for name in ENGINES if name != "aoti")
"""`aoti` is tested in the project `lists`, which is validated when it is built."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The padded model, and an artifact of each engine."""
    return build(model(), signature(), tmp_path_factory.mktemp("padding"), SOME_ENGINES)


@pytest.fixture(scope="module")
def reference(built: Built) -> Reference:
    """The reference of the capture, with its jagged rows."""
    return Reference.load(built.capture.reference, built.signature)


def test_the_reference_has_rows_of_every_length(reference: Reference) -> None:
    begin, end = reference.inputs["jets_offsets"].values()
    counts = end - begin
    assert (counts == 0).any() and (counts == LENGTH).any() and (counts > LENGTH).any()
    assert any(case["jet"] == 0 and case["n"] > 1 for case in reference.cases)


def test_the_reference_has_the_answers_of_padded_rows(reference: Reference) -> None:
    for case, outputs in zip(reference.cases, reference.outputs, strict=True):
        expected = by_awkward(reference.inputs, case["n"], case["jet"])
        torch.testing.assert_close(outputs["scores"], expected, atol=1e-5, rtol=1e-4)


def test_every_engine_gives_the_answers_of_padded_rows(built: Built) -> None:
    assert reasons(built) == dict.fromkeys(SOME_ENGINES)


@pytest.mark.parametrize("name", SOME_ENGINES)
def test_wrong_offsets_show_in_every_engine(built: Built, name: str) -> None:
    assert_wrong_offsets_show(built.session(name))


def test_wrong_offsets_show_in_aoti(lists: project.Built) -> None:
    session = load(lists.bundle.path, mode="test", engine_name="aoti")
    assert_wrong_offsets_show(Session(session.signature, session.executable))


def assert_wrong_offsets_show(session: Session) -> None:
    """Rows with wrong offsets give NaN, and the other rows are unchanged."""
    inputs = {
        name: session.collection(name, 10 if name == "jets" else 8)
        for name in session.signature.input_collections
    }
    for member in inputs["jets"].layout.columns:
        if member.dtype == "float32":
            inputs["jets"][member.name][:] = np.arange(1, 11)
    (output,) = session.signature.output_collections
    first = session.layout(output).columns[0].name

    def answers_of(spans: list[tuple[int, int]]) -> Any:
        """The first output column of rows with these begins and ends."""
        for i, key in enumerate(("begin", "end")):
            inputs["jets_offsets"][key][:] = [span[i] for span in spans]
        scores = session.collection(output, 8)
        session.run(inputs, scores)
        return scores[first].copy()

    right = [(0, 2), (2, 2), (2, 9), (9, 10), (0, 10), (5, 5), (3, 6), (10, 10)]
    wrong = [(-1, 2), (2, 1), (0, 11), (12, 15), (-(2**63), 2**63 - 1), (2**63 - 1, -(2**63))]
    answers, spoilt = answers_of(right), answers_of([*right[:2], *wrong])
    assert np.isfinite(answers).all()
    assert (spoilt[:2] == answers[:2]).all()
    assert np.isnan(spoilt[2:]).all()


def test_items_may_lie_in_one_buffer(tmp_path: Path) -> None:
    require_valid(model(), signature("buffer"), tmp_path, ("exported",))


def test_a_padded_model_may_have_a_lower_precision() -> None:
    blocks = [torch.rand(9, 3), torch.rand(4, 1), torch.tensor([[0, 9], [2, 3], [4, 4], [1, 7]])]
    scores = in_precision(model(), "bf16")(*blocks)
    assert scores.dtype == torch.bfloat16
    torch.testing.assert_close(scores.float(), model()(*blocks), atol=0.05, rtol=0.05)


class FromBehind(Padded):
    """Keeps the last items of a row that is too long."""

    def pad(self, padding: Padding, inputs: Any) -> Tensor:
        begin, end = inputs[padding.offsets].unbind(1)
        first = torch.maximum(begin, end - padding.length)
        changed = [*inputs]
        changed[padding.offsets] = torch.stack([first, end], dim=1)
        return super().pad(padding, changed)


@pytest.mark.parametrize(("padded", "valid"), [(FromBehind, False), (Padded, True)])
def test_a_mistake_in_the_padding_is_found(padded: type[Padded], valid: bool) -> None:
    network = Preprocessed(padded(Sets().eval(), PADDED), (LOG, None, None))
    session = Session(signature(), rogues.uncompiled(network, signature()))
    reference = rogues.reference(signature(), network)  # by rows, without the padding of the graph
    tolerances = {"scores": Tolerance(1e-5, 1e-4)}
    assert validate_session(session, "exported", reference, tolerances).valid is valid


@pytest.mark.parametrize(("rows", "items"), [(2, 2), (70, 500), (70, 3), (500, 70)])
def test_reference_rows_are_consistent_at_every_size(rows: int, items: int) -> None:
    inputs = random_inputs(signature("columns", rows, items), 1, {})
    begin, end = inputs["jets_offsets"]["begin"], inputs["jets_offsets"]["end"]
    assert len(begin) == len(end) == rows
    assert ((begin >= 0) & (begin <= end) & (end <= items)).all()
    assert end[0] - begin[0] == min(LENGTH + 1, items)


class Masked(nn.Module):
    """By the mask: the first item, the count, whether there are any, and a mean over all rows."""

    def forward(self, jets: Tensor, exists: Tensor) -> tuple[Tensor, ...]:
        existing = torch.where(exists.unsqueeze(1), jets, 0.0)
        count = exists.sum(1)
        return existing[:, 0, 0], count, count.to(torch.uint8), count > 0, existing.mean()


ANSWERS = {"first": "float32", "count": "int32", "small": "uint8", "some": "bool"}
Answers = Callable[[list[tuple[int, int]]], dict[str, list[Any]]]


@pytest.fixture
def answers_of() -> Answers:
    """The answers of `Masked` for two rows with these begins and ends among twenty items."""
    every_type = Signature.build(
        {
            "jets": Layout([column("pt", "float32")], 1, "columns"),
            "jets_offsets": offsets_layout(),
            "scores": Layout([column(name, dtype) for name, dtype in ANSWERS.items()]),
            "whole": Layout([Column("mean", "float32", "scalar")]),
        },
        [Block("jets", "jets", ("pt",)), Block("at", "jets_offsets", ("begin", "end"))],
        [*(Block(name, "scores", (name,)) for name in ANSWERS), Block("mean", "whole", ("mean",))],
        {"n": RowRange(0, 70), "jet": RowRange(0, 500)},
        {"jets": "jet"},
        jagged={"jets": LENGTH},
    )
    mask = Padding(1, LENGTH, None, 0.0, (LENGTH,), "bool")
    padded = Padded(Masked(), [Padding(1, LENGTH, 0), mask])
    session = Session(every_type, rogues.uncompiled(padded, every_type))

    def answers(spans: list[tuple[int, int]]) -> dict[str, list[Any]]:
        jets, offsets = session.collection("jets", 20), session.collection("jets_offsets", 2)
        scores, whole = session.collection("scores", 2), session.collection("whole", 2)
        jets["pt"][:] = np.arange(1, 21)
        offsets["begin"][:], offsets["end"][:] = zip(*spans, strict=True)
        session.run({"jets": jets, "jets_offsets": offsets}, {"scores": scores, "whole": whole})
        return {**{n: scores[n].tolist() for n in ANSWERS}, "mean": [whole["mean"].item()]}

    return answers


def test_rows_with_right_offsets_have_answers_of_every_type(answers_of: Answers) -> None:
    """The mean is over all padded items of both rows: 4 and 5, and zeros."""
    assert answers_of([(3, 5), (2, 2)]) == {
        "first": [4, 0], "count": [2, 0], "small": [2, 0], "some": [True, False],
        "mean": [pytest.approx((4 + 5) / (2 * LENGTH))],
    }  # fmt: skip


@pytest.mark.parametrize("wrong", [(20, 0), (5, 2), (-3, -3), (21, 21), *WRONG[-2:]])
def test_a_row_with_wrong_offsets_has_no_answer_of_any_type(
    answers_of: Answers, wrong: tuple[int, int]
) -> None:
    """NaN in floats, also of an answer over all rows; the largest number, or -1, in integers."""
    answers = answers_of([(3, 5), wrong])
    assert answers["first"][0] == 4 and np.isnan(answers["first"][1])
    assert np.isnan(answers["mean"][0])
    assert (answers["count"], answers["small"]) == ([2, -1], [2, 255])
    assert answers["some"] == [True, False]
