"""What counting values costs: `python -m benchmarks.serving.watch`.

The demo's model (68 numbers a row) in production. `pipeline apply` scores a Parquet file with and
without `--counts`, in turns; its time is that of the processor, in all threads. A call of a session
is timed without the setting, with it but not drawn, and counted.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import pipeline
from benchmarks.table import print_machine
from examples.jet_tagger.generate import jets
from registry.promotion import Decision
from registry.store import Registry

ROOT = Path(__file__).resolve().parents[2]
_ROWS = 200_000
_ROUNDS = 9
_SECONDS = 0.2


def main() -> None:
    print_machine()
    with tempfile.TemporaryDirectory(prefix="soa-watch-") as name:
        folder = Path(name)
        os.environ["PIPELINE_COUNTS"] = str(folder / "counts")
        registry = Registry(f"sqlite:///{folder}/registry.db")
        config = ROOT / "configs" / "demo.yaml"
        version = pipeline.run(config, registry, folder / "work").version
        registry.promote(version, "production", (Decision("benchmark", True, "", "", ""),))
        ref = f"{version.name}@production"
        _calls(ref, registry)
        _jobs(ref, registry, folder)


def _jobs(ref: str, registry: Registry, folder: Path) -> None:
    """Print the times of `pipeline apply` with and without counts."""
    arrays: dict[str, Any] = {}
    columns, _ = jets(_ROWS, 1)
    for name, values in columns.items():
        if values.ndim == 1:
            arrays[name] = values
        else:
            flat = values.reshape(-1)
            arrays[name] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    pq.write_table(pa.table(arrays), folder / "rows.parquet")

    def job(watch: bool) -> Callable[[], None]:
        def run() -> None:
            out = folder / "out.parquet"
            out.unlink(missing_ok=True)
            pipeline.apply(ref, folder / "rows.parquet", out, registry=registry, watch=watch)

        return run

    ways = {"not counted": job(watch=False), "counted": job(watch=True)}
    taken = _in_turns(ways, time.process_time, 0.0)
    _report(f"apply, {_ROWS:,} rows", taken, 1.0, "s")


def _calls(ref: str, registry: Registry) -> None:
    """Print the times of a call of a session by the share of calls that are counted."""
    for rows in (1, 1000):
        ways = {}
        for name, share in (("without", None), ("not drawn", 1e-12), ("counted", 1.0)):
            session = pipeline.load(ref, registry=registry, watch=share)
            signature = session.signature
            collections = {key: session.collection(key, rows) for key in signature.layouts}
            inputs = {key: collections[key] for key in signature.input_collections}
            outputs = {key: collections[key] for key in signature.output_collections}
            ways[name] = session.bind(inputs, outputs)
        taken = _in_turns(ways, time.perf_counter, _SECONDS)
        _report(f"a call, {rows:,} rows", taken, 1e6, "µs")


def _in_turns(
    ways: Mapping[str, Callable[[], object]], clock: Callable[[], float], seconds: float
) -> dict[str, list[float]]:
    """The mean times of a call of each way, in s by `clock`, in `_ROUNDS` rounds of at least one
    call and `seconds`."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS):
        for name, run in ways.items():
            begun, calls = clock(), 0
            while calls == 0 or clock() - begun < seconds:
                run()
                calls += 1
            taken[name].append((clock() - begun) / calls)
    return taken


def _report(title: str, taken: Mapping[str, list[float]], scale: float, unit: str) -> None:
    """Print the median time of each way, with its spread and the median ratio to the first."""
    base = np.array(next(iter(taken.values())))
    for name, seconds in taken.items():
        ratio = median(np.array(seconds) / base)
        times = [each * scale for each in seconds]
        print(
            f"{title:22} {name:12} {median(times):9.3f} {unit} "
            f"({min(times):.3f} … {max(times):.3f})  x{ratio:.3f}"
        )


if __name__ == "__main__":
    main()
