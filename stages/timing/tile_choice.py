"""Choose a tile: a fixed number of rows at a time, in the same bound memory.

If each row's answer depends on this row only, a run may be cut into tiles. Its intermediate values
then stay in the processor's cache for any number of rows, and several threads may share the tiles.
First the artifact must show that its rows are independent (independence.py). Then every case of the
reference is validated in tiles.
"""

from __future__ import annotations

import math

from runtime.session import Session, in_tiles
from soa.signature import Signature
from stages.reference import TILES, Arrays
from stages.timing.racing import bind_call, race, time_warm_s

_WORTH = 0.95  # tiles are used if they need at most this part of the time
_AS_GOOD = 1.03  # the smallest tile within this factor of the best: more threads can share a run
_SECONDS = 0.3  # for the race of all tiles
_LONG_S = 0.1  # a call takes at most about this long while tiles are tried
_MANY = 8 * TILES[-1]  # rows that are run to compare tiles, if the version takes so many


def fastest_tile(session: Session, inputs: Arrays) -> int | None:
    """Find the number of rows of a tile with which a session is fastest on many rows.

    None if it is fastest with all rows at once, or cannot run in tiles. Unbounded rows always run
    in tiles.
    """
    sizes = tiles_of(session.signature)
    if not sizes or session.device.type != "cpu":
        return None
    (dim,) = session.signature.dims
    rows = session.signature.ranges[dim]
    n = min(rows.max, _MANY)
    default_tile = sizes[-1] if rows.unbounded else 0
    call = bind_call(tiled(session, default_tile), inputs, {dim: n})
    seconds = time_warm_s(call)
    if seconds > _LONG_S:  # fewer rows fill any cache too
        n = max(rows.min, 2 * sizes[0], int(n * _LONG_S / seconds))
        sizes = tuple(tile for tile in sizes if 2 * tile <= n)
    contestants = dict.fromkeys((*sizes, default_tile))
    runs = {tile: bind_call(tiled(session, tile), inputs, {dim: n}) for tile in contestants}
    times = {tile: timing.median_us for tile, timing in race(runs, _SECONDS, stay=()).items()}
    best = min(times[tile] for tile in sizes)
    if best > _WORTH * times.get(0, math.inf):
        return None
    return min(tile for tile in sizes if times[tile] <= _AS_GOOD * best)


def tiles_of(signature: Signature) -> tuple[int, ...]:
    """The tiles to try: those of at most half the most rows that are compiled for. Empty if rows
    cannot run in tiles."""
    if signature.tile_kinds is None:
        return ()
    (dim,) = signature.dims
    rows = signature.ranges[dim]
    fit = tuple(tile for tile in TILES if 2 * tile <= rows.max)
    return fit or ((rows.max // 2,) if rows.unbounded else ())


def tiled(session: Session, rows: int) -> Session:
    """A session of the same opened artifact that runs `rows` rows at a time; 0: all at once."""
    executable = in_tiles(session.executable, session.signature, rows)
    return Session(session.signature, executable, str(session.device))
