"""Time a model with glibc's default allocator and with `keep_freed_memory`, in turns.

`python -m benchmarks.memory.allocator [REF]`; REF is particlenet@production by default. The setting
is for a whole process, so each measurement is a separate process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from benchmarks.table import print_machine
from pipeline.loading import load
from pipeline.report.tables import microseconds, new_table, show
from runtime.opening import Opening, open_version
from runtime.process import keep_freed_memory
from stages.reference.answers import Reference
from stages.timing import bind_call, race

_SIZES = (1, 8, 32)
_ROUNDS = 3
_SECONDS = 1.5
_WAYS = ("as it comes", "keep_freed_memory")


def main(ref: str = "particlenet@production") -> None:
    print_machine()
    taken: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
    for _ in range(_ROUNDS):
        for way, times in taken.items():
            command = [sys.executable, "-m", "benchmarks.memory.allocator", ref, way]
            process = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            times.append(json.loads(process.stdout))
    table = new_table(f"{ref}: a call, median", "rows", *_WAYS, "times as fast")
    for n in map(str, _SIZES):
        before, after = (statistics.median(times[n] for times in taken[way]) for way in _WAYS)
        table.add_row(n, microseconds(before), microseconds(after), f"{before / after:.2f}")
    show([table])


def timed(ref: str, way: str) -> dict[int, float]:
    """By number of rows: the median time of a call in microseconds, in this process."""
    if way == "keep_freed_memory":
        keep_freed_memory()
    bundle = open_version(Opening(ref)).bundle
    session = load(ref)
    inputs = Reference.load(bundle.file(bundle.manifest.reference)).inputs
    (dim,) = session.signature.dims
    calls = {n: bind_call(session, inputs, {dim: n}) for n in _SIZES}
    return {n: race({"": call}, _SECONDS)[""].median_us for n, call in calls.items()}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(timed(*sys.argv[1:])))
    else:
        main(*sys.argv[1:])
