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
    mlp = subject(FEATURES, highest=sizes[-1])
    compiled = aoti(aoti_package(mlp.model, mlp.signature, mlp.inputs, mlp.folder))
    session = mlp.session()
    print_panels(CAPTION, [measure(mlp, session, compiled, sizes, seconds=1.0)])
    print(share_of_copies(mlp, session, compiled, 100_000, seconds=2.0))
    for n in (10, 1_000, 100_000):
        if n < sizes[-1]:
            print(cost_of_a_start(mlp, session, n, seconds=2.0))


def measure(
    mlp: Subject, session: Session, model: Model, sizes: Sequence[int], seconds: float
) -> Panel:
    """Time `session` bound to the columns, `model` on packed rows, and the binding itself."""
    races = {}
    for n in sizes:
        inputs, outputs = mlp.collections(n)
        other_binding = session.bind(*mlp.collections(n))
        runs: dict[str, Callable[[], object]] = {
            _OURS: session.bind(inputs, outputs),
            "pack, AOTI, unpack": copying_way(
                mlp.signature, model, {"inputs": inputs}, {"outputs": outputs}
            ),
            "ours: bind": partial(session.bind, inputs, outputs),
            "ours: rebind": partial(other_binding.rebind, inputs, outputs),
            "ours: 2 resizes": partial(_resize_twice, other_binding, n),
        }
        races[n] = race(runs, seconds)
    return race_panel(f"{len(mlp.inputs['inputs'])} columns", "rows", races, _OURS)


def share_of_copies(mlp: Subject, session: Session, model: Model, n: int, seconds: float) -> str:
    """One line with the times of the two parts of the way with copies: the copies, the kernels."""
    inputs, outputs = mlp.collections(n)
    rows = torch.stack([inputs.tensor(c.name) for c in inputs.layout.columns], dim=1)
    answer = model([rows])
    timed = race(
        {
            "pack and unpack alone": copying_way(
                mlp.signature, lambda _: answer, {"inputs": inputs}, {"outputs": outputs}
            ),
            "AOTI with its rows ready": lambda: model([rows]),
            "ours, bound": session.bind(inputs, outputs),
        },
        seconds,
    )
    parts = ", ".join(f"{name} {microseconds(t.median_us)}" for name, t in timed.items())
    return f"{len(inputs.layout.columns)} columns, {n:,} rows: {parts}"


def cost_of_a_start(mlp: Subject, session: Session, n: int, seconds: float) -> str:
    """One line with the times of windows that begin at rows aligned to 128 bytes, and at others."""
    starts = (0, 32, 1, 33)  # 32 float32 are 128 bytes
    inputs, outputs = mlp.collections(n + max(starts))
    bindings = {
        f"from row {start}": session.bind(
            inputs.window(start, start + n), outputs.window(start, start + n)
        )
        for start in starts
    }
    parts = [f"{name} {microseconds(t.median_us)}" for name, t in race(bindings, seconds).items()]
    return f"{len(inputs.layout.columns)} columns, {n:,} rows of more: {', '.join(parts)}"


def _resize_twice(binding: Binding, n: int) -> None:
    """Resize a binding of n rows to one row less, and back."""
    binding.resize(n - 1)
    binding.resize(n)


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or SIZES)
