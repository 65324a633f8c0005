"""Boosted trees of LightGBM beside their other runtimes.

    python -m benchmarks.speed.trees [TxL ...]

T trees of L leaves, trained on generated rows of 14 columns; `binary`, so that each answer has a
sigmoid. All contestants run on one core, and every call gets other rows, from many: a branch
predictor learns a few rows by heart. Peers get float64 matrices, without the time of packing.
lleaves and tl2cgen take part if they can be imported; lleaves needs llvmlite before 0.43.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.subject import Subject, one_core, subject
from benchmarks.table import print_machine, spread
from pipeline.report.tables import microseconds, new_table, show
from soa import Collection
from stages.model.trees import load_trees
from stages.reports import Timing
from stages.timing import race

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Call:
    """A call of some rows, and the answers after it."""

    run: Callable[[], Any]
    answers: Callable[[], Any]


Contestant = Callable[[Rows], Call]

_SHAPES = ("10x8", "120x63", "500x31", "100x255")
_PEERS = ("lleaves", "tl2cgen", "LightGBM")
_TO_THE_END = ("ours", "lleaves")
"""Slow peers take part in the first rounds only: after their turns, the caches and the branch
predictor of the core know nothing of the next contestant."""
_FEATURES = 14
_SIZES = (1, 4, 1000)
_SECONDS = 1.0
_SETS = 256
_MOST = 20_000  # leaves, above which lleaves compiles for many minutes


def main(shapes: Sequence[str]) -> None:
    print_machine()
    torch.set_num_threads(1)
    table = new_table("Trees", "trees", "rows", "ours", "spread", *(f"{p} x" for p in _PEERS))
    for shape in shapes or _SHAPES:
        trees, leaves = map(int, shape.split("x"))
        with tempfile.TemporaryDirectory() as folder, one_core():
            file = trained(Path(folder) / "trees.txt", trees, leaves)
            made = subject(_FEATURES, max(_SIZES), load_trees(file), outputs=1)
            calls = {"ours": ours(made)}
            calls |= {name: make(file) for name, make in peers(trees * leaves).items()}
            for n in _SIZES:
                timed = race(turns(calls, n), _SECONDS, stay=_TO_THE_END)
                table.add_row(shape, f"{n:,}", *cells(timed))
    show([table])


def cells(found: Mapping[str, Timing]) -> Iterator[str]:
    """Our time and its spread, and how many times as long each peer takes."""
    own = found["ours"]
    yield microseconds(own.median_us).replace(" ", "")
    yield spread(own)
    for name in _PEERS:
        yield f"{found[name].median_us / own.median_us:.2f}" if name in found else "-"


def drawn(n: int, seed: int) -> Rows:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((n, _FEATURES)).astype(np.float32)
    x[:, 3], x[:, 5] = draw.integers(0, 6, n), draw.exponential(1, n)
    return x


def trained(file: Path, trees: int, leaves: int) -> Path:
    import lightgbm

    x = drawn(60_000, 0)
    score = x[:, 0] * x[:, 1] + np.sin(3 * x[:, 2]) + 0.3 * x[:, 3] + 0.5 * x[:, 4] * x[:, 5]
    labels = score + 0.5 * np.random.default_rng(1).standard_normal(len(x)) > 1
    told = {"objective": "binary", "num_leaves": leaves, "verbosity": -1, "num_threads": 1,
            "min_data_in_leaf": 5, "learning_rate": 0.05, "seed": 1}  # fmt: skip
    lightgbm.train(told, lightgbm.Dataset(x, labels.astype(int)), trees).save_model(file)
    return file


def turns(contestants: dict[str, Contestant], n: int) -> dict[str, Callable[[], object]]:
    """For each contestant a function that makes the next of many calls. Their answers agree."""
    sets = [drawn(n, seed) for seed in range(max(1, min(_SETS, 4096 // n)))]
    runs: dict[str, Callable[[], object]] = {}
    wanted: list[float] = []
    for name, make in contestants.items():
        calls = [make(rows) for rows in sets]
        calls[0].run()
        found = np.asarray(calls[0].answers(), np.float64).reshape(-1)
        wanted = wanted or found.tolist()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        runs[name] = in_turn([call.run for call in calls])
    return runs


def in_turn(every: Sequence[Callable[[], object]]) -> Callable[[], object]:
    following = itertools.cycle(every)
    return lambda: next(following)()


def ours(made: Subject) -> Contestant:
    session = made.session()

    def call(rows: Rows) -> Call:
        given = Collection(made.signature.layouts["inputs"], len(rows))
        written = Collection(made.signature.layouts["outputs"], len(rows))
        for k in range(_FEATURES):
            given.fill(f"x{k}", rows[:, k])
        return Call(session.bind(given, written), lambda: written["y0"])

    return call


def peers(leaves: int) -> dict[str, Callable[[Path], Contestant]]:
    found: dict[str, Callable[[Path], Contestant]] = {"LightGBM": _lightgbm}
    for name, make in (("lleaves", _lleaves), ("tl2cgen", _tl2cgen)):
        if importlib.util.find_spec(name) and (name != "lleaves" or leaves <= _MOST):
            found[name] = make
    return found


@contextmanager
def silent() -> Iterator[None]:
    """Drops what native code prints."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def asked(run: Callable[[], Any]) -> Call:
    """A call that returns its answers."""
    return Call(run, run)


def _lightgbm(file: Path) -> Contestant:
    import lightgbm

    booster = lightgbm.Booster(model_file=file)

    def call(rows: Rows) -> Call:
        given = rows.astype(np.float64)
        return asked(lambda: booster.predict(given, num_threads=1))

    return call


def _lleaves(file: Path) -> Contestant:
    """Its compiled function itself, in blocks of trees for many rows, as its page advises."""
    lleaves = importlib.import_module("lleaves")
    blocks, whole = lleaves.Model(str(file)), lleaves.Model(str(file))
    blocks.compile()
    whole.compile(fblocksize=whole.num_trees())

    def call(rows: Rows) -> Call:
        given, written = rows.astype(np.float64), np.zeros(len(rows))
        at, to = (x.ctypes.data_as(ctypes.POINTER(ctypes.c_double)) for x in (given, written))
        run = (whole if len(rows) < 100 else blocks)._c_entry_func
        return Call(lambda: run(at, to, 0, len(given)), lambda: written)

    return call


def _tl2cgen(file: Path) -> Contestant:
    tl2cgen, treelite = map(importlib.import_module, ("tl2cgen", "treelite"))
    library = file.with_suffix(".so")
    flags = ["-O3", "-march=native"]
    with silent():
        model = treelite.frontend.load_lightgbm_model(file)
        parts = {"parallel_comp": 8}
        tl2cgen.export_lib(model, "gcc", library, params=parts, options=flags)
    predictor = tl2cgen.Predictor(library, nthread=1)

    def call(rows: Rows) -> Call:
        given = tl2cgen.DMatrix(rows.astype(np.float64))
        return asked(lambda: predictor.predict(given))

    return call


if __name__ == "__main__":
    main(sys.argv[1:])
