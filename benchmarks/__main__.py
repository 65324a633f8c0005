"""Every benchmark, one after another: `python -m benchmarks`. Each also runs alone."""

from __future__ import annotations

import subprocess
import sys

NAMES = ("overhead", "copies", "threads", "gnn", "memory", "zoo")

if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        print(f"\n== python -m benchmarks.{name}\n", flush=True)
        # A process each: what one leaves behind, as threads and memory, is not the next one's.
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
