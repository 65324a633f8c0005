"""Score files with one and two local Dask workers: `python -m benchmarks.serving.workers [ROWS]`.

The rows and the model are those of benchmarks/serving/apply.py. The workers have already opened the
version; the fastest of three runs counts. `job` is the time of a whole job, in which this process
joins the parts; `parts` is the time until all parts are written, without joining them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import pipeline
from benchmarks.serving.apply import generate, prepare
from benchmarks.table import print_machine
from pipeline.applying import Execute, on_dask
from pipeline.applying import prepare as planned


def main(rows: int) -> None:
    print_machine()
    with tempfile.TemporaryDirectory(prefix="soa-workers-") as name:
        folder = Path(name)
        prepare(folder)
        for suffix in ("parquet", "root"):
            generate(folder / f"rows.{suffix}", rows)
            print(f"\n{rows:,} rows of {suffix}")
            base: tuple[float, float] | None = None
            for workers in (1, 2):
                with on_dask(f"local:{workers}") as execute:
                    runs = [timed(folder, suffix, execute) for _ in range(4)][1:]
                parts, job = (min(each) for each in zip(*runs, strict=True))
                base = base or (parts, job)
                print(
                    f"  {workers} workers   parts {parts:6.2f} s {base[0] / parts:5.2f}x   "
                    f"job {job:6.2f} s {base[1] / job:5.2f}x   {rows / job / 1e6:.2f} M rows/s"
                )


def timed(folder: Path, suffix: str, execute: Execute) -> tuple[float, float]:
    """The time until all parts are written, and the time of a whole job, in seconds."""
    source, out = folder / f"rows.{suffix}", folder / f"out.{suffix}"
    out.unlink(missing_ok=True)
    registry = f"sqlite:///{folder}/registry.db"
    job = planned(
        "mlp@production", [source], out, columns={}, keep=["event"], tree=None, suffix=None,
        mode="production", registry=registry,
    )  # fmt: skip
    Path(job.folder).mkdir()
    begun = time.perf_counter()
    for _ in execute(job.plan, job.pieces):
        pass
    parts = time.perf_counter() - begun
    shutil.rmtree(job.folder)
    done = pipeline.apply(
        "mlp@production", source, out, keep=["event"], registry=registry, execute=execute
    )
    return parts, done.seconds - done.start


if __name__ == "__main__":
    main(int((sys.argv[1:] or ["10000000"])[0]))
