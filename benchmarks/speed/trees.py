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
            forest = subject(_FEATURES, max(_SIZES), load_trees(file), outputs=1)
            contestants = {"ours": ours(forest)}
            contestants |= {name: make(file) for name, make in peers(trees * leaves).items()}
            for n in _SIZES:
                timed = race(turns(contestants, n), _SECONDS, stay=_TO_THE_END)
                table.add_row(shape, f"{n:,}", *cells(timed))
    show([table])


def cells(timed: Mapping[str, Timing]) -> Iterator[str]:
    """Our time and its spread, and how many times as long each peer takes."""
    own = timed["ours"]
    yield microseconds(own.median_us).replace(" ", "")
    yield spread(own)
    for name in _PEERS:
        yield f"{timed[name].median_us / own.median_us:.2f}" if name in timed else "-"


def random_rows(n: int, seed: int) -> Rows:
    """Rows of `_FEATURES` columns: normal, but column 3 has few whole numbers, and 5 a tail."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((n, _FEATURES)).astype(np.float32)
    x[:, 3], x[:, 5] = draw.integers(0, 6, n), draw.exponential(1, n)
    return x


def trained(file: Path, trees: int, leaves: int) -> Path:
    """Train a classifier of LightGBM, and write it to `file`."""
    import lightgbm

    x = random_rows(60_000, 0)
    score = x[:, 0] * x[:, 1] + np.sin(3 * x[:, 2]) + 0.3 * x[:, 3] + 0.5 * x[:, 4] * x[:, 5]
    labels = score + 0.5 * np.random.default_rng(1).standard_normal(len(x)) > 1
    parameters = {"objective": "binary", "num_leaves": leaves, "verbosity": -1, "num_threads": 1,
            "min_data_in_leaf": 5, "learning_rate": 0.05, "seed": 1}  # fmt: skip
    lightgbm.train(parameters, lightgbm.Dataset(x, labels.astype(int)), trees).save_model(file)
    return file


def turns(contestants: dict[str, Contestant], n: int) -> dict[str, Callable[[], object]]:
    """For each contestant a function that makes the next of many calls. Their answers agree."""
    sets = [random_rows(n, seed) for seed in range(max(1, min(_SETS, 4096 // n)))]
    runs: dict[str, Callable[[], object]] = {}
    expected: list[float] = []
    for name, make in contestants.items():
        calls = [make(rows) for rows in sets]
        calls[0].run()
        answers = np.asarray(calls[0].answers(), np.float64).reshape(-1)
        expected = expected or answers.tolist()  # those of the first contestant
        np.testing.assert_allclose(answers, expected, rtol=1e-5, atol=1e-6)
        runs[name] = in_turn([call.run for call in calls])
    return runs


def in_turn(functions: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A function that calls the next of these, and after the last the first again."""
    following = itertools.cycle(functions)
    return lambda: next(following)()


def ours(forest: Subject) -> Contestant:
    """Bound calls of `lanes`."""
    session = forest.session()

    def call(rows: Rows) -> Call:
        inputs = Collection(forest.signature.layouts["inputs"], len(rows))
        outputs = Collection(forest.signature.layouts["outputs"], len(rows))
        for k in range(_FEATURES):
            inputs.fill(f"x{k}", rows[:, k])
        return Call(session.bind(inputs, outputs), lambda: outputs["y0"])

    return call


def peers(leaves: int) -> dict[str, Callable[[Path], Contestant]]:
    """The other runtimes that are installed; `leaves`: of all trees together."""
    makers: dict[str, Callable[[Path], Contestant]] = {"LightGBM": _lightgbm}
    if importlib.util.find_spec("lleaves") and leaves <= _MOST:
        makers["lleaves"] = _lleaves
    if importlib.util.find_spec("tl2cgen"):
        makers["tl2cgen"] = _tl2cgen
    return makers


@contextmanager
def silent() -> Iterator[None]:
    """Drops what native code prints."""
    sys.stdout.flush()
    stdout = os.dup(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def returning_call(run: Callable[[], Any]) -> Call:
    """A call of a function that returns its answers."""
    return Call(run, run)


def _lightgbm(file: Path) -> Contestant:
    """LightGBM itself, in one thread."""
    import lightgbm

    booster = lightgbm.Booster(model_file=file)

    def call(rows: Rows) -> Call:
        matrix = rows.astype(np.float64)
        return returning_call(lambda: booster.predict(matrix, num_threads=1))

    return call


def _lleaves(file: Path) -> Contestant:
    """Its compiled function itself, in blocks of trees for many rows, as its page advises."""
    lleaves = importlib.import_module("lleaves")
    blocks, whole = lleaves.Model(str(file)), lleaves.Model(str(file))
    blocks.compile()
    whole.compile(fblocksize=whole.num_trees())

    def call(rows: Rows) -> Call:
        matrix, answers = rows.astype(np.float64), np.zeros(len(rows))
        pointer = ctypes.POINTER(ctypes.c_double)
        source, target = (array.ctypes.data_as(pointer) for array in (matrix, answers))
        run = (whole if len(rows) < 100 else blocks)._c_entry_func
        return Call(lambda: run(source, target, 0, len(matrix)), lambda: answers)

    return call


def _tl2cgen(file: Path) -> Contestant:
    """Its predictor, in one thread. The C code is in eight files: gcc is slow for large ones."""
    tl2cgen, treelite = map(importlib.import_module, ("tl2cgen", "treelite"))
    library = file.with_suffix(".so")
    flags = ["-O3", "-march=native"]
    with silent():
        model = treelite.frontend.load_lightgbm_model(file)
        files = {"parallel_comp": 8}
        tl2cgen.export_lib(model, "gcc", library, params=files, options=flags)
    predictor = tl2cgen.Predictor(library, nthread=1)

    def call(rows: Rows) -> Call:
        matrix = tl2cgen.DMatrix(rows.astype(np.float64))
        return returning_call(lambda: predictor.predict(matrix))

    return call


if __name__ == "__main__":
    main(sys.argv[1:])
