"""The cost of starting a process: `python -m benchmarks.memory.start`.

A model with the single engine `lanes` is built, promoted and pulled into a temporary folder. Each
row of the table is a process, timed from its beginning to its end: Python, all imports, and the
answer of a command, or a session and its first answer on 1,000 rows. The columns are the elapsed
time, the processor time (user and system, of the process and its children), and the peak memory.
They are medians of N processes (default 7); the rows take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = 1000

ANSWER = """
import {package}
session = {package}.load({ref!r}{options})
signature = session.signature
inputs = {{name: session.collection(name, {rows}) for name in signature.input_collections}}
outputs = {{name: session.collection(name, {rows}) for name in signature.output_collections}}
session.run(inputs, outputs)
"""


@dataclass(frozen=True)
class Took:
    """One process: its elapsed and processor time in seconds, and its peak memory in MB."""

    wall: float
    cpu: float
    memory: float


@dataclass(frozen=True)
class Start:
    """A row: the arguments of Python, and the folder of our modules."""

    arguments: tuple[str, ...]
    modules: Path = ROOT


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory.start")
    parser.add_argument("--processes", type=int, default=7, metavar="N")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="soa-start-") as name:
        folder = Path(name)
        # In another process: memory of this process would be counted for those that it starts.
        code = "import sys, benchmarks.memory.start as s; s.prepare(s.Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", code, name], cwd=ROOT, check=True)
        starts = rows(folder)
        taken: dict[str, list[Took]] = {row: [] for row in starts}
        for turn in range(options.processes + 1):
            for row, start in starts.items():
                took = timed(start, folder)
                if turn:  # the first turn reads the files into memory and fills the cache
                    taken[row].append(took)
    from benchmarks.table import print_machine
    from pipeline.report.tables import new_table, show

    print_machine()
    table = new_table("a process, from its beginning to its end", "", "clock", "processor", "most")
    for row, processes in taken.items():
        wall = statistics.median(process.wall for process in processes)
        cpu = statistics.median(process.cpu for process in processes)
        memory = statistics.median(process.memory for process in processes)
        table.add_row(row, f"{wall:.2f} s", f"{cpu:.2f} s", f"{memory:.0f} MB")
    show([table])


def prepare(folder: Path) -> None:
    """Make a registry with start/1 in production, a pulled copy of it, and a file of rows."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from benchmarks.subject import in_production
    from pipeline.promotion import pull

    registry = in_production(folder, "start", "lanes")
    pull(registry, "start@production", folder / "pulled")
    values = np.random.default_rng(1).random((8, ROWS), dtype=np.float32)
    columns = {f"x{i}": column for i, column in enumerate(values)}
    pq.write_table(pa.table(columns), folder / "rows.parquet")


def rows(folder: Path) -> dict[str, Start]:
    """The table's rows by name, in the order of running: `show FILE` reads what `apply` wrote."""

    def answer(package: str, ref: str, options: str = "") -> tuple[str, str]:
        code = ANSWER.format(package=package, ref=ref, options=options, rows=ROWS)
        return ("-c", code)

    def command(*words: str) -> tuple[str, ...]:
        return ("-m", "pipeline", *words)

    cached = ", lookup='prefer-cache', max_age_s=1e6"
    ours = {
        "python": ("-c", ""),
        "import numpy": ("-c", "import numpy"),
        "import torch": ("-c", "import torch"),
        "pipeline --help": command("--help"),
        "pipeline ls": command("ls"),
        "pipeline show": command("show", "start/1"),
        "pipeline history": command("history", "start"),
        "pipeline registry policy": command("registry", "policy"),
        f"pipeline apply, {ROWS:,} rows": command(
            "apply",
            "start@production",
            f"{folder}/rows.parquet",
            "--out",
            f"{folder}/scored",
            "--force",
        ),
        "pipeline show FILE": command("show", f"{folder}/scored/rows.parquet"),
        "pipeline.load(NAME@production)": answer("pipeline", "start@production"),
        "the same, from the cache": answer("pipeline", "start@production", cached),
        "pipeline.load(FOLDER)": answer("pipeline", f"{folder}/pulled"),
    }
    starts = {row: Start(arguments) for row, arguments in ours.items()}
    arguments = answer("soa_runtime", f"{folder}/pulled")
    starts["soa_runtime.load(FOLDER)"] = Start(arguments, ROOT / "packages" / "soa-runtime")
    return starts


def timed(start: Start, folder: Path) -> Took:
    """Run it once. If it fails, raise SystemExit with its output."""
    environment = {k: value for k, value in os.environ.items() if not k.startswith("PYTHON")}
    environment |= {
        "PIPELINE_REGISTRY": f"sqlite:///{folder}/registry.db",
        "PIPELINE_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(start.modules),
    }
    output = folder / "output"
    with output.open("wb") as log:
        begun = time.perf_counter()
        child = os.posix_spawn(
            sys.executable,
            (sys.executable, "-P", *start.arguments),  # -P: no modules from the working folder
            environment,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
            ],
        )
        _, status, usage = os.wait4(child, 0)
        wall = time.perf_counter() - begun
    if status:
        raise SystemExit(f"{' '.join(start.arguments)}: {output.read_text()[-2000:]}")
    return Took(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


if __name__ == "__main__":
    main()
