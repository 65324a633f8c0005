"""How the threads of a GPU's block compute rows together, with intermediate values in its shared
memory: how many rows, and which sums of a product each thread has in registers."""

from __future__ import annotations

import itertools
from statistics import fmean

from engines.lanes.planning.blocking import Loops, Sums
from engines.lanes.planning.plan import Kernel, Plan
from engines.lanes.tensors import Product

_ROWS = 1, 4, 8, 16  # with two rows, threads meet in the same banks of the memory
_SUMS = 7  # the fewest sums of a product for each thread
_USES = 16  # how often a weight that was loaded is used, at least
_TILE = 128  # the most bytes of sums that a thread has in registers at a time
_LATENCY = 16  # the fewest cycles of a step of a sum


def rows_together(plan: Plan, threads: int, room: int) -> int:
    """How many rows a block computes, whose memory has `room` bytes; 0 if it holds not even one.

    So many that the threads have work, and use each weight often; a network with many positions
    does so with one row.
    """
    fit = [rows for rows in _ROWS if 4 * plan.size * rows <= room]
    products = [
        loops
        for step in plan.steps
        if isinstance(step, Kernel) and isinstance(step.inner, Product)
        if (loops := Loops.of(step, plan.elements)) is not None
    ]
    work = [_sums(each) * each.length for each in products]
    if not fit or not products:
        return fit[-1] if fit else 0
    positions = fmean([each.m.extent for each in products], work)
    sums = fmean(map(_sums, products), work)
    enough = (rows for rows in fit if rows * positions >= _USES and rows * sums >= _SUMS * threads)
    return next(enough, fit[-1])


def _sums(loops: Loops) -> int:
    return loops.around * loops.m.extent * loops.j.extent


def tile(loops: Loops, threads: int, rows: int) -> Sums:
    """The sums of a thread with the fewest estimated cycles of a block. A load takes as long as
    four fma, since four groups of threads share the unit that loads."""

    def cycles(most: Sums) -> tuple[int, int]:
        sums, loads = most.m * most.j * most.r, most.m * most.r + most.j
        rounds = -(-tiles(loops, most, rows) * loops.around // threads)
        return rounds * max(sums + 4 * loads, _LATENCY), sums

    fit = [
        Sums(m, j, r)
        for m, j, r in itertools.product(*([1, 2, 4, 8],) * 3)
        if m * j * r * loops.size <= _TILE
        and m < 2 * loops.m.extent
        and j < 2 * loops.j.extent
        and r <= (1 if loops.weights is None else rows)
    ]
    return min(fit, key=cycles)


def tiles(loops: Loops, most: Sums, rows: int) -> int:
    """How many tiles have all sums of some rows for one step of the outer loops."""
    across, down = -(-loops.j.extent // most.j), -(-loops.m.extent // most.m)
    return across * down * (rows // most.r)
