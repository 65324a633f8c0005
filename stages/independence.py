"""Test an artifact: does each row's answer depend on this row only?

The graph of a program shows it first, at capture (engines/exported/row_dependence.py). Then the
artifact is tested: some of the reference's rows, alone and in another order, must give the answers
that they gave among the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runtime.checked import Tolerance, compare
from runtime.session import Session
from soa.memory import Collection, read_block

SEE_EACH_OTHER = "the rows see each other, so it cannot run on some of them at a time"
Columns = Mapping[str, Mapping[str, torch.Tensor]]

_ROWS = 256


def rows_are_independent(
    session: Session, inputs: Columns, tolerances: Mapping[str, Tolerance]
) -> bool:
    """Whether every row's answer depends on this row only, within the tolerances. The test uses
    rows of the reference.

    `inputs[collection][column]` has as many rows as the largest n; up to 256 of them are used.
    """
    signature = session.signature
    if signature.tile_kinds is None:
        return False
    (dim,) = signature.dims
    low, high = signature.ranges[dim].min, min(signature.ranges[dim].max, _ROWS)
    some = max(low, high // 3, 1)
    if some >= high:  # no part of the rows can be tried
        return False
    shuffled = torch.randperm(high, generator=torch.Generator().manual_seed(1)).tolist()
    whole = _answers(session, inputs, range(high))
    trials = [shuffled[:some], shuffled, list(range(high - some, high)), shuffled[-some:]]
    return all(_agree(_answers(session, inputs, rows), whole, rows, tolerances) for rows in trials)


def _answers(session: Session, inputs: Columns, rows: Sequence[int]) -> dict[str, torch.Tensor]:
    """The outputs by block for these rows of the inputs, in this order."""
    signature = session.signature
    index = torch.tensor(rows)
    given = {name: Collection(signature.layouts[name], len(rows)) for name in inputs}
    for name, collection in given.items():
        for column in collection.layout.numbers:
            values = inputs[name][column.name]
            collection.fill(column.name, values if column.kind == "scalar" else values[index])
    written = {
        name: given.get(name) or Collection(signature.layouts[name], len(rows))
        for name in signature.output_collections
    }
    session.run(given, written)
    return {b.name: read_block(b, written[b.block.collection]) for b in signature.outputs}


def _agree(
    part: Mapping[str, torch.Tensor],
    whole: Mapping[str, torch.Tensor],
    rows: Sequence[int],
    tolerances: Mapping[str, Tolerance],
) -> bool:
    index = torch.tensor(rows)
    return all(
        compare(found, whole[name][index], tolerances[name], classifier=False).outside
        <= tolerances[name].max_outside
        for name, found in part.items()
    )
