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
    columns, _ = jets(_ROWS, 1)
    arrays = {
        name: values if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(
            values.reshape(-1), values.shape[1]
        )
        for name, values in columns.items()
    }  # fmt: skip
    pq.write_table(pa.table(arrays), folder / "rows.parquet")

    def job(watch: bool) -> Callable[[], None]:
        def run() -> None:
            out = folder / "out.parquet"
            out.unlink(missing_ok=True)
            pipeline.apply(ref, folder / "rows.parquet", out, registry=registry, watch=watch)

        return run

    _report(f"apply, {_ROWS:,} rows", {"not counted": job(False), "counted": job(True)}, 1.0)


def _calls(ref: str, registry: Registry) -> None:
    for rows in (1, 1000):
        ways = {}
        for name, share in (("without", None), ("not drawn", 1e-12), ("counted", 1.0)):
            session = pipeline.load(ref, registry=registry, watch=share)
            given = {name: session.collection(name, rows) for name in session.signature.layouts}
            inputs = {name: given[name] for name in session.signature.input_collections}
            outputs = {name: given[name] for name in session.signature.output_collections}
            ways[name] = session.bind(inputs, outputs)
        _report(f"a call, {rows:,} rows", ways, 1e6)


def _report(title: str, ways: Mapping[str, Callable[[], object]], unit: float) -> None:
    """The median time of each way in turns, in s or µs, with its spread and the ratio to the
    first."""
    clock = time.perf_counter if unit > 1 else time.process_time
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS):
        for name, run in ways.items():
            begun, calls = clock(), 0
            while calls == 0 or (unit > 1 and clock() - begun < _SECONDS):
                run()
                calls += 1
            taken[name].append((clock() - begun) / calls * unit)
    base = np.array(next(iter(taken.values())))
    for name, times in taken.items():
        ratio = median(np.array(times) / base)
        print(
            f"{title:22} {name:12} {median(times):9.3f} {'s' if unit == 1 else 'µs'} "
            f"({min(times):.3f} … {max(times):.3f})  x{ratio:.3f}"
        )


if __name__ == "__main__":
    main()
