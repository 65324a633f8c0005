"""Jagged rows are padded inside the graph as Awkward pads them, the same in every engine."""

from __future__ import annotations

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
from stages.reference.offsets import by_rows
from tests.models import project, rogues
from tests.models.building import ENGINES, build, reasons, require_valid

LENGTH = 6


class Echo(nn.Module):
    """Returns its inputs."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs


def echoed(paddings: list[int | Padding], *blocks: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The padded inputs, by the code of the graph and by that of the reference."""
    model = Padded(Echo(), paddings)
    return list(model(*blocks)), list(by_rows(model)(*blocks))


@given(
    counts=st.lists(st.integers(0, 9), max_size=12),
    length=st.integers(1, 7),
    value=st.sampled_from([0.0, -1.5]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    order=st.randoms(),
)
def test_padding_is_awkwards(
    counts: list[int], length: int, value: float, dtype: torch.dtype, order: Any
) -> None:
    array = ak.unflatten(
        np.arange(1.0, sum(counts) + 1, dtype=np.float32), np.array(counts, np.int64)
    )
    ends = np.cumsum([0, *counts])
    rows = order.sample(range(len(counts)), len(counts))  # in any order, as in Awkward
    offsets = torch.tensor([[ends[row], ends[row + 1]] for row in rows], dtype=dtype).reshape(-1, 2)
    flat = torch.arange(1.0, sum(counts) + 1)
    items = torch.stack([flat, -flat], dim=1)
    wanted = ak.fill_none(ak.pad_none(array[np.array(rows, np.int64)], length, clip=True), value)
    one = torch.from_numpy(ak.to_numpy(wanted).astype(np.float32)).reshape(-1, length)
    there = torch.arange(length) < torch.tensor(counts)[rows].unsqueeze(1)
    other = torch.where(there, -one, value)
    for found in echoed(
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
        assert torch.equal(found[0], torch.stack([one, other], dim=1))
        assert torch.equal(found[1], torch.stack([one, other], dim=2))
        assert torch.equal(found[2], there.unsqueeze(1).float())
        assert torch.equal(found[3], there)
        assert found[4] is items
        assert torch.equal(found[5], one)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
def test_items_keep_their_dtype_and_shape(dtype: torch.dtype) -> None:
    items = torch.tensor([[[1, 0]], [[1, 1]], [[0, 1]]]).to(dtype)
    for (found,) in echoed([Padding(1, 3, 0)], items, torch.tensor([[0, 2], [3, 3], [2, 3]])):
        assert found.dtype == dtype and found.shape == (3, 1, 2, 3)
        assert found.long().tolist() == [
            [[[1, 1, 0], [0, 1, 0]]],
            [[[0, 0, 0], [0, 0, 0]]],
            [[[0, 0, 0], [1, 0, 0]]],
        ]


WRONG = [(-1, 2), (2, 1), (0, 4), (5, 9), (-(2**63), 2**63 - 1), (2**63 - 1, -(2**63))]


@pytest.mark.parametrize("begin, end", WRONG)
def test_a_row_with_wrong_offsets_has_no_items_and_spoils_no_other(begin: int, end: int) -> None:
    items = torch.tensor([[1.0], [2.0], [3.0]])
    offsets = torch.tensor([[0, 2], [begin, end], [2, 3]])
    model = Padded(Echo(), [Padding(1, 2, 0)])
    (found,) = model(items, offsets)
    assert found.tolist() == [[[1, 2]], [[0, 0]], [[3, 0]]]
    with pytest.raises(CaptureError):  # no reference has such offsets
        by_rows(model)(items, offsets)
    (whole,) = model(items.long(), offsets)
    assert whole.tolist() == found.tolist()


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
        there = exists.unsqueeze(1)
        each = torch.relu(self.each(jets))
        each = torch.where(there, each, 0.0)
        pooled = [each.sum(dim=2), each.amax(dim=2)]
        found: Tensor = self.last(torch.cat([*pooled, energy], dim=1))
        return found


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
    return Preprocessed(Padded(Sets().eval(), PADDED), (LOG, None, None))


def by_hand(inputs: dict[str, dict[str, Tensor]], n: int, m: int) -> Tensor:
    """The network's answers on rows of `inputs` that Awkward padded."""
    jets, offsets = inputs["jets"], inputs["jets_offsets"]
    begin, end = (offsets[key][:n].clamp(max=m).numpy() for key in ("begin", "end"))
    pt, eta, charge = (jets[name][:m].float() for name in ("pt", "eta", "charge"))
    columns = [torch.where(pt > 0, f, 0.25) for f in (pt.log(), eta, charge * eta)]
    content = ak.contents.RecordArray([ak.contents.NumpyArray(f.numpy()) for f in columns], None)
    starts, stops = ak.index.Index64(begin), ak.index.Index64(end)
    rows = ak.pad_none(ak.Array(ak.contents.ListArray(starts, stops, content)), LENGTH, clip=True)
    padded = [ak.to_numpy(ak.fill_none(rows[str(k)], 0.25)) for k in range(3)]
    there = torch.from_numpy(end - begin).unsqueeze(1) > torch.arange(LENGTH)
    features = torch.from_numpy(np.stack(padded, axis=1).astype(np.float32))
    with torch.no_grad():
        found: Tensor = Sets()(features, there, inputs["events"]["energy"][:n].unsqueeze(1))
    return found


def test_every_engine_gives_the_answers_of_padded_rows(tmp_path: Path) -> None:
    """`aoti` is tested in the project `lists`, which is validated when it is built."""
    given_to = signature()
    engines = tuple(name for name in ENGINES if name != "aoti")
    built = build(model(), given_to, tmp_path, engines)
    reference = Reference.load(built.capture.reference, given_to)
    begin, end = reference.inputs["jets_offsets"].values()
    counts = end - begin
    assert (counts == 0).any() and (counts == LENGTH).any() and (counts > LENGTH).any()
    assert any(case["jet"] == 0 and case["n"] > 1 for case in reference.cases)
    for case, outputs in zip(reference.cases, reference.outputs, strict=True):
        expected = by_hand(reference.inputs, case["n"], case["jet"])
        torch.testing.assert_close(outputs["scores"], expected, atol=1e-5, rtol=1e-4)
    assert reasons(built) == dict.fromkeys(engines)
    for name in engines:
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
    for each in inputs["jets"].layout.columns:
        if each.dtype == "float32":
            inputs["jets"][each.name][:] = np.arange(1, 11)
    (output,) = session.signature.output_collections
    first = session.layout(output).columns[0].name
    right = [(0, 2), (2, 2), (2, 9), (9, 10), (0, 10), (5, 5), (3, 6), (10, 10)]
    answers = []
    wrong = [(-1, 2), (2, 1), (0, 11), (12, 15), (-(2**63), 2**63 - 1), (2**63 - 1, -(2**63))]
    for spans in (right, [*right[:2], *wrong]):
        for i, key in enumerate(("begin", "end")):
            inputs["jets_offsets"][key][:] = [span[i] for span in spans]
        scores = session.collection(output, 8)
        session.run(inputs, scores)
        answers.append(scores[first].copy())
    assert np.isfinite(answers[0]).all()
    assert (answers[1][:2] == answers[0][:2]).all()
    assert np.isnan(answers[1][2:]).all()


def test_one_buffer_of_items_will_do_and_less_precision(tmp_path: Path) -> None:
    require_valid(model(), signature("buffer"), tmp_path, ("exported",))
    half = in_precision(model(), "bf16")
    blocks = [torch.rand(9, 3), torch.rand(4, 1), torch.tensor([[0, 9], [2, 3], [4, 4], [1, 7]])]
    found = half(*blocks)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), model()(*blocks), atol=0.05, rtol=0.05)


class FromBehind(Padded):
    """Keeps the last items of a row that is too long."""

    def padded(self, one: Padding, inputs: Any) -> Tensor:
        begin, end = inputs[one.offsets].unbind(1)
        first = torch.maximum(begin, end - one.length)
        changed = [*inputs]
        changed[one.offsets] = torch.stack([first, end], dim=1)
        return super().padded(one, changed)


def test_a_mistake_in_the_padding_is_found() -> None:
    given_to = signature()
    wrong = Preprocessed(FromBehind(Sets().eval(), PADDED), (LOG, None, None))
    tolerances = {"scores": Tolerance(1e-5, 1e-4)}
    for tried, valid in ((wrong, False), (model(), True)):
        reference = rogues.reference(given_to, tried)
        session = Session(given_to, rogues.uncompiled(tried, given_to))
        assert validate_session(session, "exported", reference, tolerances).valid is valid


def test_reference_rows_are_consistent_at_every_size() -> None:
    for rows, items in ((2, 2), (70, 500), (70, 3), (500, 70)):
        inputs = random_inputs(signature("columns", rows, items), 1, {})
        begin, end = inputs["jets_offsets"]["begin"], inputs["jets_offsets"]["end"]
        assert len(begin) == len(end) == rows
        assert ((begin >= 0) & (begin <= end) & (end <= items)).all()
        assert end[0] - begin[0] == min(LENGTH + 1, items)


class Masked(nn.Module):
    """By the mask: the first item, the count, whether there are any, and a mean over all rows."""

    def forward(self, jets: Tensor, exists: Tensor) -> tuple[Tensor, ...]:
        kept = torch.where(exists.unsqueeze(1), jets, 0.0)
        count = exists.sum(1)
        return kept[:, 0, 0], count, count.to(torch.uint8), count > 0, kept.mean()


def test_a_row_with_wrong_offsets_has_no_answer_of_any_type() -> None:
    answers = {"first": "float32", "count": "int32", "small": "uint8", "some": "bool"}
    given_to = Signature.build(
        {
            "jets": Layout([column("pt", "float32")], 1, "columns"),
            "jets_offsets": offsets_layout(),
            "scores": Layout([column(name, dtype) for name, dtype in answers.items()]),
            "whole": Layout([Column("mean", "float32", "scalar")]),
        },
        [Block("jets", "jets", ("pt",)), Block("at", "jets_offsets", ("begin", "end"))],
        [*(Block(name, "scores", (name,)) for name in answers), Block("mean", "whole", ("mean",))],
        {"n": RowRange(0, 70), "jet": RowRange(0, 500)},
        {"jets": "jet"},
        jagged={"jets": LENGTH},
    )
    mask = Padding(1, LENGTH, None, 0.0, (LENGTH,), "bool")
    padded = Padded(Masked(), [Padding(1, LENGTH, 0), mask])
    session = Session(given_to, rogues.uncompiled(padded, given_to))

    def found(spans: list[tuple[int, int]]) -> dict[str, list[Any]]:
        jets, offsets = session.collection("jets", 20), session.collection("jets_offsets", 2)
        scores, whole = session.collection("scores", 2), session.collection("whole", 2)
        jets["pt"][:] = np.arange(1, 21)
        offsets["begin"][:], offsets["end"][:] = zip(*spans, strict=True)
        session.run({"jets": jets, "jets_offsets": offsets}, {"scores": scores, "whole": whole})
        read = {name: scores[name].tolist() for name in answers}
        return {**read, "mean": [whole["mean"].item()]}

    right = found([(3, 5), (2, 2)])
    assert right == {
        "first": [4, 0], "count": [2, 0], "small": [2, 0], "some": [True, False],
        "mean": [pytest.approx(9 / (2 * LENGTH))],
    }  # fmt: skip
    for wrong in [(20, 0), (5, 2), (-3, -3), (21, 21), *WRONG[-2:]]:
        got = found([(3, 5), wrong])
        assert got["first"][0] == 4 and np.isnan(got["first"][1]) and np.isnan(got["mean"][0])
        assert (got["count"], got["small"], got["some"]) == ([2, -1], [2, 255], [True, False])
