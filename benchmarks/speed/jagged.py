"""Jagged columns, padded in the artifact or before: `python -m benchmarks.speed.jagged [N ...]`.

The inputs are jets as uproot returns them, with eight float32 columns and on average six jets in an
event; the network reads the first sixteen. Ours reads items and offsets without a copy. The other
ways first pad, with NumPy or with Awkward, and run the same network on padded rows. All write their
answers into columns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.subject import Subject, captured
from benchmarks.table import SPREAD, print_machine, print_panels, race_panel
from engines.exported import quiet_torch
from soa import Block, Layout, RowRange, Signature, column
from soa.memory import from_jagged
from soa.signature import offsets_layout
from stages.model.fronts import Padded, Padding
from stages.reports import Timing
from stages.timing import race

LENGTH, MEAN = 16, 6
NAMES = tuple(f"x{i}" for i in range(8))
CAPTION = f"DeepSets of up to {LENGTH} jets, from jagged columns.\nx: to ours; {SPREAD}."
_OURS = "ours, padded inside"


class Sets(nn.Module):
    """(n, 8, 16) and a mask (n, 1, 16) -> (n, 3)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.each = nn.Conv1d(len(NAMES), hidden, 1)
        self.last = nn.Linear(hidden, 3)

    def forward(self, jets: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(self.last((torch.relu(self.each(jets)) * mask).sum(dim=2)), dim=1)


def main(sizes: list[int]) -> None:
    torch.set_num_threads(1)
    print_machine()
    panels = []
    for hidden in (4, 64):
        deep_sets = subject(max(sizes), hidden)
        races = {n: measure(deep_sets, n, seconds=2.0) for n in sizes}
        panels.append(race_panel(f"{hidden} hidden", "events", races, _OURS))
    print_panels(CAPTION, panels)


def subject(highest: int, hidden: int) -> Subject:
    """`Sets` on jagged jets, of up to `highest` events and twice as many jets as on average."""
    signature = Signature.build(
        {
            "jets": Layout([column(name, "float32") for name in NAMES], 1, "columns"),
            "jets_offsets": offsets_layout(),
            "scores": Layout([column(name, "float32") for name in "pqr"]),
        },
        [
            Block("jets", "jets", NAMES),
            Block("jets_offsets", "jets_offsets", ("begin", "end")),
        ],
        [Block("scores", "scores", ("p", "q", "r"))],
        {"n": RowRange(0, max(highest, 64)), "jet": RowRange(0, 2 * MEAN * max(highest, 64))},
        {"jets": "jet"},
        jagged={"jets": LENGTH},
    )
    network = Sets(hidden).eval().requires_grad_(False)
    model = Padded(network, [Padding(1, LENGTH, 0), Padding(1, LENGTH, None)])
    return captured(model, signature)


def measure(deep_sets: Subject, n: int, seconds: float) -> dict[str, Timing]:
    """Time all ways on n events. All must give our answers."""
    rng = np.random.default_rng(n)
    counts = rng.poisson(MEAN, n)
    columns = {x: rng.normal(size=counts.sum()).astype(np.float32) for x in NAMES}
    events = ak.unflatten(ak.Array(columns), counts)
    session = deep_sets.session()
    inputs = from_jagged(events, deep_sets.signature, "jets")
    scores, copies = session.collection("scores", n), session.collection("scores", n)
    runs: dict[str, Callable[[], object]] = {_OURS: session.bind(inputs, scores)}
    network = deep_sets.model.model
    assert isinstance(network, Sets)
    models = {"AOTI": _on_rows(network, deep_sets.folder), "eager": network}
    columns_of_copies = [copies.tensor(name) for name in "pqr"]
    runs[_OURS]()
    by_numpy = _by_numpy(inputs)
    for padding, pad in {"NumPy": by_numpy, "Awkward": lambda: _by_awkward(events)}.items():
        for name, model in models.items():
            way = runs[f"{padding}, then {name}"] = _copying(pad, model, columns_of_copies)
            way()
            for theirs, ours in zip(columns_of_copies, map(scores.tensor, "pqr"), strict=True):
                torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-4)
    runs["padding alone, NumPy"] = by_numpy
    return race(runs, seconds)


def _copying(pad: Callable[[], Any], model: Any, columns: list[Tensor]) -> Callable[[], None]:
    """A call that pads, runs, and copies the answers into columns."""

    def run() -> None:
        with torch.no_grad():
            jets, mask = map(torch.from_numpy, pad())
            for column_of_answers, answer in zip(columns, model(jets, mask).unbind(1), strict=True):
                column_of_answers.copy_(answer)

    return run


def _by_numpy(inputs: Any) -> Callable[[], Any]:
    """A function that pads with NumPy, with one gather for each column. It returns jets (n, 8, 16)
    and their mask (n, 1, 16), as float32."""
    columns = [inputs["jets"][name] for name in NAMES]
    begin, end = inputs["jets_offsets"]["begin"], inputs["jets_offsets"]["end"]

    def pad() -> Any:
        index = begin[:, None] + np.arange(LENGTH)
        mask = index < end[:, None]
        index[~mask] = 0
        rows = np.empty((len(begin), len(NAMES), LENGTH), np.float32)
        for k, values in enumerate(columns):
            np.multiply(values[index], mask, out=rows[:, k])
        return rows, mask[:, None].astype(np.float32)

    return pad


def _by_awkward(events: Any) -> Any:
    """The same jets and mask, padded with Awkward."""
    padded = ak.pad_none(events, LENGTH, clip=True)
    rows = [ak.to_numpy(ak.fill_none(padded[name], np.float32(0))) for name in NAMES]
    mask = np.arange(LENGTH) < ak.to_numpy(ak.num(events))[:, None]
    return np.stack(rows, axis=1).astype(np.float32), mask[:, None].astype(np.float32)


def _on_rows(network: nn.Module, folder: Path) -> Any:
    """The network alone, compiled on padded rows."""
    path = folder / "rows.pt2"
    if not path.exists():
        rows = {0: torch.export.Dim("n", min=0)}
        example = torch.rand(5, len(NAMES), LENGTH), torch.ones(5, 1, LENGTH)
        with quiet_torch():
            exported = torch.export.export(network, example, dynamic_shapes=(rows, rows))
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(path), inductor_configs={"cpp.threads": 1}
            )
    return torch._inductor.aoti_load_package(str(path))


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [1, 100, 10_000])
