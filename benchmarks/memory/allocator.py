"""Time a model with glibc's default allocator and with `keep_freed_memory`, in turns.

`python -m benchmarks.memory.allocator [REF]`; REF is particlenet@production by default. The setting
is for a whole process, so each measurement is a separate process.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.table import print_machine
from pipeline.report.tables import microseconds, new_table, show

_REF = "particlenet@production"
_SIZES = (1, 8, 32)
_ROUNDS = 3
_SECONDS = 1.5
_WAYS = {"as it comes": False, "keep_freed_memory": True}


def main(ref: str = _REF) -> int:
    print_machine()
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    for _ in range(_ROUNDS):
        for way, keep in _WAYS.items():
            child = ("benchmarks.memory.allocator", "--child", ref, str(int(keep)))
            done = subprocess.run([sys.executable, "-m", *child], stdout=subprocess.PIPE)
            if done.returncode:
                return done.returncode
            found[way].append(json.loads(done.stdout))
    table = new_table(
        f"{ref}: p50 of a call (least … most of {_ROUNDS} processes)",
        "rows", *_WAYS, "times as fast",
    )  # fmt: skip
    for n in found["as it comes"][0]["us"]:
        by_way = [[each["us"][n] for each in found[way]] for way in _WAYS]
        one, other = map(statistics.median, by_way)
        table.add_row(n, *map(_spread, by_way), f"{one / other:.2f}")
    table.add_row("memory, most", *(f"{max(e['mb'] for e in found[way]):.0f} MB" for way in _WAYS))
    show([table])
    return 0


def _spread(times: Sequence[float]) -> str:
    low, middle, high = min(times), statistics.median(times), max(times)
    return f"{microseconds(middle)} ({microseconds(low)} … {microseconds(high)})"


def _child(ref: str, keep: bool) -> int:
    from benchmarks.serving.triton import timed
    from pipeline.loading import load
    from runtime.opening import Opening, open_version
    from runtime.process import keep_freed_memory
    from soa.errors import SoaPipelineError
    from stages.reference.answers import Reference
    from stages.timing import bound_call

    if keep:
        keep_freed_memory()
    try:
        bundle = open_version(Opening(ref)).bundle
        session = load(ref)
    except SoaPipelineError as error:
        print(f"benchmarks.memory.allocator: {error}", file=sys.stderr)
        return 1
    inputs = Reference.load(bundle.file(bundle.manifest.reference)).inputs
    ((dim, rows),) = session.signature.ranges.items()
    times = {
        n: statistics.median(timed(bound_call(session, inputs, {dim: n}), _SECONDS))
        for n in _SIZES
        if n <= rows.max
    }
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"us": times, "mb": most}))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(_child(sys.argv[2], sys.argv[3] == "1"))
    sys.exit(main(*sys.argv[1:]))
