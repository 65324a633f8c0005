"""A call without copies against the usual way with copies: `python -m benchmarks.speed.copies`.

Both go from SoA columns to SoA columns. Ours is bound to the columns. The other packs them into a
row-major tensor, runs the same model compiled by plain AOTInductor, and unpacks the answer. It also
times `Session.bind`, `Binding.rebind`, two changes of n, and windows whose first row is not aligned
in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.row_major import Model, aoti, aoti_package, copying_way
from benchmarks.subject import Subject, subject
from benchmarks.table import SPREAD, Panel, print_machine, print_panels, race_panel
from pipeline.report.tables import microseconds
from runtime.session.binding import Binding
from runtime.session.session import Session
from stages.timing import race

CAPTION = (
    f"A small MLP from SoA columns to SoA columns; ours copies nothing.\nx: to ours; {SPREAD}."
)
_OURS = "ours"
FEATURES = 32
SIZES = (10, 100, 1_000, 10_000, 100_000, 1_000_000)


def main(sizes: Sequence[int]) -> None:
    torch.set_num_threads(1)
    print_machine()
    made = subject(FEATURES, highest=sizes[-1])
    compiled = aoti(aoti_package(made.model, made.signature, made.inputs, made.folder))
    session = made.session()
    print_panels(CAPTION, [measure(made, session, compiled, sizes, seconds=1.0)])
    print(share_of_copies(made, session, compiled, 100_000, seconds=2.0))
    for n in (10, 1_000, 100_000):
        if n < sizes[-1]:
            print(cost_of_a_start(made, session, n, seconds=2.0))


def measure(
    made: Subject, session: Session, model: Model, sizes: Sequence[int], seconds: float
) -> Panel:
    """Time `session` bound to the columns, `model` on packed rows, and the binding itself."""
    races = {}
    for n in sizes:
        given, written = made.collections(n)
        moved = session.bind(*made.collections(n))
        runs: dict[str, Callable[[], object]] = {
            _OURS: session.bind(given, written),
            "pack, AOTI, unpack": copying_way(
                made.signature, model, {"inputs": given}, {"outputs": written}
            ),
            "ours: bind": partial(session.bind, given, written),
            "ours: rebind": partial(moved.rebind, given, written),
            "ours: 2 resizes": partial(_there_and_back, moved, n),
        }
        races[n] = race(runs, seconds)
    return race_panel(f"{len(made.inputs['inputs'])} columns", "rows", races, _OURS)


def share_of_copies(made: Subject, session: Session, model: Model, n: int, seconds: float) -> str:
    """One line with the times of the two parts of the way with copies: the copies, the kernels."""
    given, written = made.collections(n)
    rows = torch.stack([given.tensor(c.name) for c in given.layout.columns], dim=1)
    answer = model([rows])
    timed = race(
        {
            "pack and unpack alone": copying_way(
                made.signature, lambda _: answer, {"inputs": given}, {"outputs": written}
            ),
            "AOTI with its rows ready": lambda: model([rows]),
            "ours, bound": session.bind(given, written),
        },
        seconds,
    )
    parts = ", ".join(f"{name} {microseconds(t.median_us)}" for name, t in timed.items())
    return f"{len(given.layout.columns)} columns, {n:,} rows: {parts}"


def cost_of_a_start(made: Subject, session: Session, n: int, seconds: float) -> str:
    """One line with the times of windows that begin at rows aligned to 128 bytes, and at others."""
    given, written = made.collections(n + 33)
    starts = {
        f"from row {start}": session.bind(
            given.window(start, start + n), written.window(start, start + n)
        )
        for start in (0, 32, 1, 33)
    }
    parts = [f"{name} {microseconds(t.median_us)}" for name, t in race(starts, seconds).items()]
    return f"{len(given.layout.columns)} columns, {n:,} rows of more: {', '.join(parts)}"


def _there_and_back(binding: Binding, n: int) -> None:
    binding.resize(n - 1)
    binding.resize(n)


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or SIZES)
