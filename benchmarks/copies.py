"""Zero copies against the way it is done today: `python -m benchmarks.copies`.

End to end, from SoA columns to SoA columns: ours bound, against packing them into a row-major
tensor, running the same model compiled by plain AOTInductor, and unpacking the answer. The time of
`Session.bind` alone is beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.overhead import row_major_package
from benchmarks.subject import Subject, subject
from benchmarks.table import print_machine, print_race
from stages.benchmark import Timing, race

_SIZES = (10, 100, 1_000, 10_000, 100_000, 1_000_000)


def main() -> None:
    torch.set_num_threads(1)
    print_machine()
    for features in (3, 32):
        made = subject(features, highest=1_000_000)
        session = made.session()
        compiled = torch._inductor.aoti_load_package(row_major_package(made, 1_000_000))
        columns: dict[str, dict[str, Timing]] = {}
        for n in _SIZES:
            given, written = made.collections(n)
            binding = session.bind(given, written)
            runs: dict[str, Callable[[], object]] = {
                "bound, no copy (ours)": binding,
                "pack, AOTInductor, unpack": copying_way(made, compiled.loader, n),
                "bind alone (ours)": partial(session.bind, given, written),
            }
            columns[f"n={n}"] = race(runs, seconds=1.0)
        title = f"{features} columns, SoA to SoA: median (p05 … p95), ratio to ours"
        print_race(title, columns, "bound, no copy (ours)")


def copying_way(made: Subject, loader: object, n: int) -> Callable[[], None]:
    """Columns → one row-major tensor → plain AOTInductor → columns."""
    given, written = made.collections(n)
    views = [given[name] for name in made.names]
    outputs = [written[name] for name in ("p", "q", "r")]

    def run() -> None:
        rows = torch.stack(views, dim=1)
        answer = loader.run([rows])[0]  # type: ignore[attr-defined]
        for i, view in enumerate(outputs):
            view.copy_(answer[:, i])

    return run


if __name__ == "__main__":
    main()
