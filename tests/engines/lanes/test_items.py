"""Loops over the items of several columns of a jagged collection."""

from __future__ import annotations

from pathlib import Path

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
# For each loop, the number of its results.
RESULTS = {
    "items": 2, "columns": LENGTH, "both": 1, "largest": 2, "place": LENGTH, "spread": 2,
    "summed": 2 * LENGTH, "summed_columns": 2 * LENGTH, "product": 1, "sorted": 2 * LENGTH,
}  # fmt: skip


class Loops(nn.Module):
    """Sums, extrema, scans and sorts along items, along columns, and along both."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = (
            x.sum(2), x.sum(1), torch.log1p((x * x).sum((1, 2))), x.amax(2), x.argmax(1).float(),
            x.var(2), x.cumsum(2), x.cumsum(1), x.prod(2).prod(1), x.sort(2).values,
        )  # fmt: skip
        return tuple(each.flatten(1) if each.dim() > 1 else each.unsqueeze(1) for each in found)


def test_loops_over_several_columns_of_items(tmp_path: Path) -> None:
    names = {name: tuple(f"{name}_{k}" for k in range(n)) for name, n in RESULTS.items()}
    signature = Signature.build(
        {
            "jets": Layout([column("pt", "float32"), column("eta", "float32")], storage="columns"),
            "jets_offsets": offsets_layout(),
            "out": Layout([column(each, "float32") for own in names.values() for each in own]),
        },
        [Block("x", "jets", ("pt", "eta")), Block("at", "jets_offsets", ("begin", "end"))],
        [Block(name, "out", own) for name, own in names.items()],
        {"n": RowRange(1, 60), "jet": RowRange(0, 200)},
        {"jets": "jet", "jets_offsets": "n", "out": "n"},
        jagged={"jets": LENGTH},
    )
    model = Padded(Loops(), [Padding(1, LENGTH, 0)])
    built = build(model, signature, tmp_path, ("lanes",))
    tolerances = dict.fromkeys(RESULTS, Tolerance(1e-5, 1e-5))
    report = validate_session(
        built.session("lanes"), "lanes", Reference.load(built.capture.reference), tolerances
    )
    assert report.valid, report.why
