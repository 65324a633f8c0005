"""Run the benchmarks in `NAMES`, one after another: `python -m benchmarks`."""

from __future__ import annotations

import subprocess
import sys

NAMES = ("overhead", "copies", "threads", "gnn", "memory", "zoo")

if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        print(f"\n== python -m benchmarks.{name}\n", flush=True)
        # Separate processes: threads and memory of one must not affect the next.
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
