"""How the threads of a GPU's block compute rows together, with intermediate values in its shared
memory: how many rows, and which sums of a product each thread has in registers."""

from __future__ import annotations

import itertools
from statistics import fmean

from engines.lanes.planning.blocking import Loops, Sums
from engines.lanes.planning.plan import Kernel, Plan
from engines.lanes.tensors import Product

_ROWS = 1, 4, 8, 16  # with two rows, threads meet in the same banks of the memory
_LEAST_SUMS = 7  # of a product for each thread
_LEAST_USES = 16  # of a weight that was loaded
_MOST_BYTES = 128  # of sums that a thread has in registers at a time
_LATENCY = 16  # the fewest cycles of a step of a sum


def rows_together(plan: Plan, threads: int, room: int) -> int:
    """How many rows a block computes, whose memory has `room` bytes; 0 if it holds not even one.

    So many that the threads have work, and use each weight often; a network with many positions
    does so with one row.
    """
    fit = [rows for rows in _ROWS if 4 * plan.size * rows <= room]
    if not fit:
        return 0
    steps = (step for step in plan.steps if isinstance(step, Kernel))
    products = (Loops.of(step, plan.elements) for step in steps if isinstance(step.inner, Product))
    in_registers = [loops for loops in products if loops is not None]
    if not in_registers:
        return fit[-1]
    # Means by the work of each product.
    work = [_sums(loops) * loops.length for loops in in_registers]
    positions = fmean([loops.m.extent for loops in in_registers], work)
    sums = fmean(map(_sums, in_registers), work)
    for rows in fit:
        if rows * positions >= _LEAST_USES and rows * sums >= _LEAST_SUMS * threads:
            return rows
    return fit[-1]


def _sums(loops: Loops) -> int:
    """How many sums a product has for a row."""
    return loops.around * loops.m.extent * loops.j.extent


def tile(loops: Loops, threads: int, rows: int) -> Sums:
    """The sums of a thread with the fewest estimated cycles of a block. A load takes as long as
    four fma, since four groups of threads share the unit that loads."""

    def cycles(most: Sums) -> tuple[int, int]:
        """For one step of all sums; of equal ones, the smallest tile is the least."""
        sums, loads = most.m * most.j * most.r, most.m * most.r + most.j
        rounds = -(-tiles(loops, most, rows) * loops.around // threads)
        return rounds * max(sums + 4 * loads, _LATENCY), sums

    fit = [
        Sums(m, j, r)
        for m, j, r in itertools.product((1, 2, 4, 8), repeat=3)
        if m * j * r * loops.size <= _MOST_BYTES
        and m < 2 * loops.m.extent
        and j < 2 * loops.j.extent
        and r <= (1 if loops.weights is None else rows)
    ]
    return min(fit, key=cycles)


def tiles(loops: Loops, most: Sums, rows: int) -> int:
    """How many tiles have all sums of some rows for one step of the outer loops."""
    across, down = -(-loops.j.extent // most.j), -(-loops.m.extent // most.m)
    return across * down * (rows // most.r)
