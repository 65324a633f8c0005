"""Tiles: so many rows at a time through the same bound memory, where rows do not see each other.

What a run computes in between then stays in the processor's cache however many rows there are, and
several threads may share the tiles. A signature does not say whether a row's answer is its own, so
the model is asked: some of the reference's rows, alone and in another order, must give the answers
they gave among the others. That is a trial on the reference's rows, not a proof for all rows; every
case of the reference is then validated through the tiles as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engines.native import NativeExecutable
from runtime.checked import Tolerance, compare
from runtime.session import Session
from soa.memory import Collection, fill_column, read_block
from soa.signature import Signature
from stages.benchmark import bound_call, race
from stages.reference import TILES, Arrays

Columns = Mapping[str, Mapping[str, torch.Tensor]]

_ROWS = 256
_WORTH = 0.95  # of the time: a twentieth saved, or the artifact stays whole
_AS_GOOD = 1.03  # of the fastest tile's time: then the smaller one, which more threads can share
_SECONDS = 0.3


def fastest_tile(session: Session, inputs: Arrays) -> int | None:
    """The tile with which a session is fastest on its most rows; None: all rows at once."""
    signature, executable = session.signature, session.executable
    if not isinstance(executable, NativeExecutable) or session.device.type != "cpu":
        return None
    sizes = tiles_of(signature)
    if not sizes:
        return None
    (dim,) = signature.dims
    case = {dim: signature.ranges[dim].max}
    runs = {}
    for rows in (0, *sizes):
        run_in_tiles(session, rows)
        runs[str(rows)] = bound_call(session, inputs, case)
    run_in_tiles(session, 0)
    times = {int(rows): timing.median_us for rows, timing in race(runs, _SECONDS).items()}
    best = min(times[rows] for rows in sizes)
    if best > _WORTH * times[0]:
        return None
    return min(rows for rows in sizes if times[rows] <= _AS_GOOD * best)


def tiles_of(signature: Signature) -> tuple[int, ...]:
    """The tiles to try: those that cut the largest number of rows."""
    if signature.tile_kinds is None:
        return ()
    (dim,) = signature.dims
    return tuple(rows for rows in TILES if rows < signature.ranges[dim].max)


def run_in_tiles(session: Session, rows: int) -> None:
    """Have what is bound from now on run on `rows` rows at a time; 0: on all at once."""
    assert isinstance(session.executable, NativeExecutable)
    session.executable.run_in_tiles(session.signature.tile_kinds or "", rows)


def rows_are_independent(
    session: Session, inputs: Columns, tolerances: Mapping[str, Tolerance]
) -> bool:
    """Whether every row's answer is its own, within the tolerances, on the reference's rows.

    `inputs[collection][column]` are rows to try with, the maximum or fewer; up to 256 are used.
    """
    signature = session.signature
    if signature.tile_kinds is None:
        return False
    (dim,) = signature.dims
    low, high = signature.ranges[dim].min, min(signature.ranges[dim].max, _ROWS)
    some = max(low, high // 3, 1)
    if some >= high:  # no room for a part: nothing can be tried
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
        for column in collection.layout.columns:
            values = inputs[name][column.name]
            fill_column(collection, column, values if column.kind == "scalar" else values[index])
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
