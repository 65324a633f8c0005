"""Tiles: run so many rows at a time through the same bound memory, if rows do not see each other.

The intermediate values of a run then stay in the processor's cache for any number of rows, and
several threads may share the tiles. The graph of the program shows at capture whether a row's
answer depends on this row only (engines/exported/rows.py). The artifact is tested as well: some of
the reference's rows, alone and in another order, must give the answers that they gave among the
others. Then every case of the reference is validated through the tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from runtime.checked import Tolerance, compare
from runtime.session import Session, in_tiles
from soa.memory import Collection, read_block
from soa.signature import Signature
from stages.benchmark import bound_call, race, seconds_of
from stages.reference import TILES, Arrays

SEE_EACH_OTHER = "the rows see each other, so it cannot run on some of them at a time"
Columns = Mapping[str, Mapping[str, torch.Tensor]]

_ROWS = 256
_WORTH = 0.95  # tiles are used if they need at most this part of the time
_AS_GOOD = 1.03  # within this factor of the fastest tile the smaller one is taken: more threads
_SECONDS = 0.3
_LONG_S = 0.1  # a call takes at most so long while tiles are tried
_MANY = 8 * TILES[-1]


def fastest_tile(session: Session, inputs: Arrays) -> int | None:
    """The tile with which a session is fastest on many rows; None: all rows at once."""
    sizes = tiles_of(session.signature)
    if not sizes or session.device.type != "cpu":
        return None
    (dim,) = session.signature.dims
    rows = session.signature.ranges[dim]
    n = min(rows.max, _MANY)
    whole = sizes[-1] if rows.unbounded else 0
    call = bound_call(tiled(session, whole), inputs, {dim: n})
    call()  # the first call may be slower than the next one
    seconds = seconds_of(call)
    if seconds > _LONG_S:  # take fewer rows: they fill any cache too
        n = max(rows.min, 2 * sizes[0], int(n * _LONG_S / seconds))
        sizes = tuple(tile for tile in sizes if 2 * tile <= n)
    runs = {
        tile: bound_call(tiled(session, tile), inputs, {dim: n})
        for tile in dict.fromkeys((*sizes, whole))
    }
    times = {tile: timing.median_us for tile, timing in race(runs, _SECONDS, stay=()).items()}
    best = min(times[tile] for tile in sizes)
    if best > _WORTH * times.get(0, math.inf):
        return None
    return min(tile for tile in sizes if times[tile] <= _AS_GOOD * best)


def tiles_of(signature: Signature) -> tuple[int, ...]:
    """The tiles to try: those of at most half the largest compiled number of rows."""
    if signature.tile_kinds is None:
        return ()
    (dim,) = signature.dims
    rows = signature.ranges[dim]
    fit = tuple(tile for tile in TILES if 2 * tile <= rows.max)
    return fit or ((rows.max // 2,) if rows.unbounded else ())


def tiled(session: Session, rows: int) -> Session:
    """The same opened artifact, run on `rows` rows at a time; 0: on all rows at once."""
    executable = in_tiles(session.executable, session.signature, rows)
    return Session(session.signature, executable, str(session.device))


def rows_are_independent(
    session: Session, inputs: Columns, tolerances: Mapping[str, Tolerance]
) -> bool:
    """Whether every row's answer depends on this row only, within the tolerances. The test uses
    rows of the reference.
    `inputs[collection][column]` are rows to try with, the maximum or fewer; up to 256 are used.
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
