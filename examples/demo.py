"""The demo: all steps for one model, from its config to production.

`python examples/demo.py` builds configs/demo.yaml, promotes the version, loads it in both modes,
runs it on jets in memory that NumPy allocated, and prints the results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.building import run
from pipeline.cli import say
from pipeline.promotion import promote
from pipeline.report import (
    describe_build,
    describe_decisions,
    describe_versions,
    microseconds,
    new_table,
    show,
    write,
)
from registry.store import Registry
from runtime.checked import CheckedSession
from runtime.loader import load
from runtime.opening import Mode
from soa.errors import SoaPipelineError
from soa.layout import Layout
from soa.memory import Collection
from stages.model import load_callable

_ROWS = (1, 10, 1000)
_CALLS = 20


def main() -> int:
    """Return the exit status. A user's mistake is reported as one line on stderr."""
    try:
        _demo(Path(__file__).resolve().parent.parent)
    except SoaPipelineError as error:
        say(f"demo: {error}")
        return 1
    return 0


def _demo(root: Path) -> None:
    """Do all steps and print their results. `root`: the folder of the repository."""
    config = root / "configs" / "demo.yaml"
    registry = Registry()

    def indented(text: str) -> None:
        say(f"   {text}")

    write("1. pipeline run configs/demo.yaml")
    result = run(config, registry, say=indented)
    show(describe_build(result.bundle))
    version = result.version
    write(f"2. pipeline promote {version.ref} --to production")
    promotion = promote(registry, version.ref, "production", say=indented)
    show(describe_decisions(f"{version.ref} to @production", promotion.decisions))
    show([describe_versions(registry.versions(version.name))])
    ref = f"{version.name}@production"
    write(f'3. pipeline.load("{ref}") on jets in SoA memory that NumPy allocated')
    jets = load_callable(f"{root / 'examples/jet_tagger/generate.py'}:jets")
    _print_runs(ref, registry, jets)


def _print_runs(ref: str, registry: Registry, jets: Callable[..., Any]) -> None:
    """Print the times and the answers of a version on the jets that `jets(n, seed)` makes."""
    table = new_table("", "mode", "engine", "jets", "a call", "right class", "largest deviation")
    modes: tuple[Mode, ...] = ("production", "test")
    for mode in modes:
        session = load(ref, mode=mode, registry=registry)
        for n in _ROWS:
            columns, truth = jets(n, seed=2026)
            inputs = numpy_collection(session.layout("jets"), columns, n)
            outputs = session.collection("tags", n)
            binding = session.bind(inputs, outputs)
            binding()
            begun = time.perf_counter()
            for _ in range(_CALLS):
                binding()
            us = (time.perf_counter() - begun) / _CALLS * 1e6
            right_share = float(np.mean(outputs["label"] == truth))
            deviation = "not compared"
            if isinstance(session, CheckedSession):
                worst = session.report.worst["probabilities"].max_abs
                deviation = f"{worst:.1e} from the reference"
            engine = session.origin.engine if session.origin else ""
            table.add_row(mode, engine, str(n), microseconds(us), f"{right_share:.1%}", deviation)
    show([table])


def numpy_collection(layout: Layout, columns: dict[str, Any], n: int) -> Collection:
    """A collection in memory that NumPy owns; memory of any framework can be used like this."""
    raw = np.zeros(layout.nbytes(n) + layout.alignment, np.uint8)
    start = -raw.ctypes.data % layout.alignment
    collection = Collection.wrap(layout, raw[start:], n)
    for column in layout.columns:
        collection[column.name][...] = columns[column.name]
    return collection


if __name__ == "__main__":
    sys.exit(main())
