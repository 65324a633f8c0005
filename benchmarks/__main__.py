"""Run the benchmarks in `NAMES`, one after another: `python -m benchmarks`."""

from __future__ import annotations

import subprocess
import sys

NAMES = {  # by the name of its plot
    "overhead": "benchmarks.speed.overhead",
    "copies": "benchmarks.speed.copies",
    "threads": "benchmarks.speed.threads",
    "gnn": "benchmarks.speed.gnn",
    "memory": "benchmarks.memory.weights",
    "zoo": "benchmarks.speed.zoo",
}

if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        print(f"\n== python -m {NAMES[name]}\n", flush=True)
        # Separate processes: threads and memory of one must not affect the next.
        subprocess.run([sys.executable, "-m", NAMES[name]], check=True)
