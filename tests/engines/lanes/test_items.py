"""A loop over the items of several columns of a jagged collection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from runtime.checked import Tolerance
from soa import Block, Layout, RowRange, Signature, column
from soa.signature import offsets_layout
from stages.judging.validate import validate_session
from stages.model.fronts.padding import Padded, Padding
from stages.reference.answers import Reference
from tests.models.building import build

LENGTH = 4


class Kind(NamedTuple):
    """A loop over x, of shape (rows, 2 columns, items), and the number of its results for a row."""

    loop: Callable[[Tensor], Tensor]
    results: int


LOOPS = {
    "along items": Kind(lambda x: x.sum(2), 2),
    "along columns": Kind(lambda x: x.sum(1), LENGTH),
    "along both": Kind(lambda x: torch.log1p((x * x).sum((1, 2))).unsqueeze(1), 1),
    "the place of the largest": Kind(lambda x: x.argmax(1).float(), LENGTH),
    "the sum so far": Kind(lambda x: x.cumsum(2).flatten(1), 2 * LENGTH),
    "a product of products": Kind(lambda x: x.prod(2).prod(1, keepdim=True), 1),
}


class Loop(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.loop = LOOPS[name].loop

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(x)


MORE = {"along items", "the place of the largest", "a product of products"}
"""Loops that the plan treats as the others."""


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in MORE)) for name in LOOPS]
)
def test_a_loop_over_items_of_several_columns_is_right(name: str, tmp_path: Path) -> None:
    """It is the only reader of the items: another one might need them in memory."""
    results = tuple(f"y{k}" for k in range(LOOPS[name].results))
    signature = Signature.build(
        {
            "jets": Layout([column("pt", "float32"), column("eta", "float32")], storage="columns"),
            "jets_offsets": offsets_layout(),
            "out": Layout([column(result, "float32") for result in results]),
        },
        [Block("x", "jets", ("pt", "eta")), Block("at", "jets_offsets", ("begin", "end"))],
        [Block("y", "out", results)],
        {"n": RowRange(0, 60), "jet": RowRange(0, 200)},
        {"jets": "jet", "jets_offsets": "n", "out": "n"},
        jagged={"jets": LENGTH},
    )
    model = Padded(Loop(name), [Padding(1, LENGTH, 0)])
    built = build(model, signature, tmp_path, ("lanes",))
    reference = Reference.load(built.capture.reference)
    tolerances = {"y": Tolerance(1e-5, 1e-5)}
    report = validate_session(built.session("lanes"), "lanes", reference, tolerances)
    assert report.valid, report.why
