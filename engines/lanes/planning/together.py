"""How the threads of a GPU's block compute rows together, with intermediate values in its shared
memory: how many rows, and which sums of a product each thread has in registers."""

from __future__ import annotations

import itertools
from statistics import fmean

from engines.lanes.planning.blocking import Loops, Sums
from engines.lanes.planning.plan import Kernel, Plan
from engines.lanes.tensors import Product

_ROWS = 1, 4, 8, 16  # not 2: its threads would wait for each other at the memory's banks
_LEAST_SUMS = 7  # so many sums of a product keep a thread busy
_LEAST_USES = 16  # so often a weight should be used once it is loaded
_MOST_BYTES = 128  # the most bytes of sums that a thread has in registers at a time
_LATENCY = 16  # the fewest cycles that a step of a sum takes
_CYCLES_OF_A_LOAD = 4  # in units of an fma: four groups of threads share the unit that loads


def rows_together(plan: Plan, threads: int, room: int) -> int:
    """Choose how many rows a block of `threads` threads computes together.

    It takes the fewest rows with which all threads have work and use each weight often. For a
    network with many positions, such as a convolution, one row may be enough. The block's shared
    memory has `room` bytes. Returns 0 if not even one row fits.
    """
    fit = [rows for rows in _ROWS if plan.row_bytes * rows <= room]
    if not fit:
        return 0
    steps = (step for step in plan.steps if isinstance(step, Kernel))
    products = [Loops.of(step, plan.elements) for step in steps if isinstance(step.inner, Product)]
    if not products:
        return fit[-1]
    # Means over the products, each weighted by its work.
    work = [_number_of_sums(loops) * loops.length for loops in products]
    positions = fmean([loops.m.extent for loops in products], work)
    sums = fmean(map(_number_of_sums, products), work)
    for rows in fit:
        if rows * positions >= _LEAST_USES and rows * sums >= _LEAST_SUMS * threads:
            return rows
    return fit[-1]


def _number_of_sums(loops: Loops) -> int:
    """The number of sums that a product computes for one row of the network."""
    return loops.around * loops.m.extent * loops.j.extent


def choose_tile(loops: Loops, threads: int, rows: int) -> Sums:
    """Choose the tile, the sums that one thread computes at a time, for which a block of threads
    takes the fewest estimated cycles. `rows` is the number of rows that the block computes
    together."""

    def cycles(most: Sums) -> tuple[int, int]:
        """The cycles that one step of all sums takes. The second number decides between equal
        tiles: the smaller one comes first."""
        sums, loads = most.m * most.j * most.r, most.m * most.r + most.j
        rounds = -(-number_of_tiles(loops, most, rows) * loops.around // threads)
        return rounds * max(sums + _CYCLES_OF_A_LOAD * loads, _LATENCY), sums

    fit = [
        Sums(m, j, r)
        for m, j, r in itertools.product((1, 2, 4, 8), repeat=3)
        if m * j * r * loops.size <= _MOST_BYTES
        and m < 2 * loops.m.extent
        and j < 2 * loops.j.extent
        and r <= (1 if loops.weights is None else rows)
    ]
    return min(fit, key=cycles)


def number_of_tiles(loops: Loops, most: Sums, rows: int) -> int:
    """The number of tiles of size `most` that cover all sums of `rows` rows in one step of the
    outer loops."""
    across, down = -(-loops.j.extent // most.j), -(-loops.m.extent // most.m)
    return across * down * (rows // most.r)
