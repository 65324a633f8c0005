"""Compare `pipeline apply` with a loop by hand: `python -m benchmarks.serving.apply [ROWS ...]`.

Eight float32 columns of Parquet or of a ROOT TTree go through 8 → 48 → 3, and an event number is
copied to the output. The loop reads batches with pyarrow or uproot, stacks the columns, runs ONNX
Runtime with its default number of threads, and writes the answers with the output settings of
`pipeline apply`. Each run is a separate process. It is timed from its beginning to its end,
including the start of Python and all imports; the fastest of three counts. A line also gives the
time before the first row (`pipeline apply` looks up, opens and tests the version), the time that
one thread takes for a row, for each step, and the peak memory. `cached` is `--lookup prefer-cache`,
which does not import MLflow.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = tuple(f"x{i}" for i in range(8))
OUT = ("p", "q", "r")
CONTESTANTS = ("by hand", "1 thread", "2 threads", "2 threads, cached")
"""The digit is the number of threads of `pipeline apply`."""
_BATCH = 100_000


def main(sizes: list[int]) -> None:
    from benchmarks.table import print_machine

    print_machine()
    with tempfile.TemporaryDirectory(prefix="soa-apply-") as name:
        folder = Path(name)
        prepare(folder)
        for suffix in ("parquet", "root"):
            for rows in sizes:
                generate(folder / f"rows.{suffix}", rows)
                print(f"\n{rows:,} rows of {suffix}")
                runs: list[Run] = []
                for name in CONTESTANTS:
                    runs.append(fastest_of_three(folder, suffix, name))
                    print(f"  {name:17} {runs[-1].in_words(rows, runs[0].seconds)}")


@dataclass(frozen=True)
class Run:
    """One process: its time in seconds, of which `scoring` after the start; the seconds of one
    thread for each step, if they are known; and its peak memory in MB."""

    seconds: float
    scoring: float
    steps: dict[str, float]
    memory: float

    def in_words(self, rows: int, base: float) -> str:
        """A line of the table; the speed is relative to a run of `base` seconds."""
        steps = (f"{name} {s / rows * 1e9:.0f} ns" for name, s in self.steps.items())
        return (
            f"{self.seconds:7.2f} s  {base / self.seconds:5.2f}x  "
            f"{rows / self.seconds / 1e6:6.2f} M rows/s  "
            f"start {self.seconds - self.scoring:5.2f} s  "
            f"peak {self.memory:5.0f} MB  {'  '.join(steps)}"
        )


def fastest_of_three(folder: Path, suffix: str, contestant: str) -> Run:
    """The fastest of three processes of a contestant."""
    return min((alone(folder, suffix, contestant) for _ in range(3)), key=lambda run: run.seconds)


def prepare(folder: Path) -> None:
    """Make a version in production of the model, and write the model as an ONNX file."""
    import torch

    from benchmarks.subject import Mlp, in_production

    in_production(folder, "mlp", "lanes", "aoti", "onnxruntime")
    example = (torch.zeros(4, len(NAMES)),)
    torch.onnx.export(
        Mlp(len(NAMES)).eval(), example, str(folder / "mlp.onnx"), dynamo=True, verbose=False,
        dynamic_shapes=({0: "n"},),
    )  # fmt: skip


def generate(path: Path, rows: int) -> None:
    """Write a ROOT or Parquet file with an event number and the columns `NAMES`."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import uproot

    draw = np.random.default_rng(1)

    def batches() -> Iterator[dict[str, Any]]:
        for low in range(0, rows, _BATCH):
            n = min(_BATCH, rows - low)
            event = {"event": np.arange(low, low + n)}
            yield event | {name: draw.normal(size=n).astype("f4") for name in NAMES}

    if path.suffix == ".root":
        with uproot.recreate(path) as file:
            tree = file.mktree("Events", {"event": "i8", **dict.fromkeys(NAMES, "f4")})
            for batch in batches():
                tree.extend(batch)
        return
    schema = pa.schema([("event", pa.int64()), *((name, pa.float32()) for name in NAMES)])
    with pq.ParquetWriter(path, schema) as file:
        for batch in batches():
            file.write_table(pa.table(batch))


def alone(folder: Path, suffix: str, contestant: str) -> Run:
    """Run one contestant in a new process."""
    (folder / f"out.{suffix}").unlink(missing_ok=True)
    words = ("benchmarks.serving.apply", "--one", str(folder), suffix, contestant)
    begun = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-m", *words], check=True, capture_output=True, text=True
    )
    seconds = time.perf_counter() - begun
    return Run(seconds, **json.loads(process.stdout.splitlines()[-1]))


def run_here(folder: Path, suffix: str, contestant: str) -> None:
    """Run one contestant in this process, and print the fields of its `Run` that it knows."""
    source, out = folder / f"rows.{suffix}", folder / f"out.{suffix}"
    steps: dict[str, float] = {}
    if contestant == "by hand":
        scoring = by_hand(folder, source, out)
    else:
        import pipeline

        report = pipeline.apply(
            "mlp@production",
            source,
            out,
            keep=["event"],
            registry=f"sqlite:///{folder}/registry.db",
            threads=int(contestant[0]),
            lookup="prefer-cache" if "cached" in contestant else "fresh",
        )
        steps = report.spent.times
        scoring = report.seconds - report.start
    (peak_kb,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    print(json.dumps({"scoring": scoring, "steps": steps, "memory": int(peak_kb) / 1024}))


def by_hand(folder: Path, source: Path, out: Path) -> float:
    """Run the loop; return its time in seconds, without imports and the opening of the model."""
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "mlp.onnx", providers=["CPUExecutionProvider"])
    (input_name,) = (node.name for node in session.get_inputs())

    def answers(columns: list[Any]) -> dict[str, Any]:
        (rows,) = session.run(None, {input_name: np.stack(columns, axis=1)})
        return {name: rows[:, i] for i, name in enumerate(OUT)}

    if source.suffix == ".root":
        import uproot

        begun = time.perf_counter()
        how = {"handler": uproot.MultithreadedFileSource, "num_workers": 1}
        with uproot.recreate(out, compression=uproot.ZSTD(1)) as file:
            tree = file.mktree("Events", {"event": "i8", **dict.fromkeys(OUT, "f4")})
            for batch in uproot.iterate(f"{source}:Events", step_size=_BATCH, library="np", **how):
                tree.extend({"event": batch["event"], **answers([batch[n] for n in NAMES])})
        return time.perf_counter() - begun
    import pyarrow as pa
    import pyarrow.parquet as pq

    begun = time.perf_counter()
    schema = pa.schema([("event", pa.int64()), *((name, pa.float32()) for name in OUT)])
    with pq.ParquetWriter(out, schema, use_dictionary=["event"]) as writer:
        for group in pq.ParquetFile(source).iter_batches(_BATCH):
            answered = answers([group[name].to_numpy() for name in NAMES])
            writer.write_table(pa.table({"event": group["event"], **answered}))
    return time.perf_counter() - begun


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run_here(Path(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        main([int(each) for each in sys.argv[1:]] or [10**4, 10**5, 10**6, 10**7])
