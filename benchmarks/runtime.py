"""What it takes to the first answer: `python -m benchmarks.runtime FOLDER [PYTHON]`.

FOLDER is a bundle of the demo that `pipeline pull --runtime` wrote; PYTHON one that has soa-runtime
alone. Each line is the median of processes that import what they need, load the folder, and answer
1,000 jets: seconds since the first import, and the memory then. `import torch` stands beside them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

PROCESSES = 7
ROOT = Path(__file__).parents[1]

MEASURE = """
import json, sys, time

begun = time.perf_counter()
{code}
seconds = time.perf_counter() - begun
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([seconds, int(status["VmRSS"].split()[0]) / 1024]))
"""

ANSWER = """
import numpy as np
{imported}
session = {load}({folder!r}, engine_name="aoti-standalone")
given = {{
    name: session.collection(name, 1000) for name in session.signature.input_collections
}}
written = {{
    name: session.collection(name, 1000) for name in session.signature.output_collections
}}
session.run(given, written)
"""


def main(folder: str, worker: str = "") -> None:
    face = {"imported": "import soa_runtime", "load": "soa_runtime.load", "folder": folder}
    whole = {"imported": "import pipeline", "load": "pipeline.load", "folder": folder}
    rows = {
        "import numpy": (sys.executable, "import numpy"),
        "import torch": (sys.executable, "import torch"),
        "pipeline.load": (sys.executable, ANSWER.format(**whole)),
        "the same, after import torch": (sys.executable, "import torch" + ANSWER.format(**whole)),
    }
    if worker:
        rows["soa_runtime.load"] = (worker, ANSWER.format(**face))
    for what, (python, code) in rows.items():
        found = [measured(python, code) for _ in range(PROCESSES + 1)][1:]
        seconds, memory = (statistics.median(each) for each in zip(*found, strict=True))
        print(f"{what:30} {seconds:6.3f} s  {memory:6.1f} MB", flush=True)


def measured(python: str, code: str) -> list[float]:
    path = {} if python != sys.executable else {"PYTHONPATH": str(ROOT)}
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [python, "-c", MEASURE.format(code=code)],
        env=clean | path, cwd="/", capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: list[float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
