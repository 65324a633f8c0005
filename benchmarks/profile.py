"""Where a call spends its time: `python -m benchmarks.profile [CONFIG ...]`; needs Linux's `perf`.

The chosen artifact is called in a loop at a large size while `perf` samples this process. The table
gives the share of samples in each kind of function (`_KINDS`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.table import print_machine
from benchmarks.zoo import asked, built, chosen_target, new_registry, sizes
from pipeline.report.tables import new_table, show
from registry.bundle.bundle import Bundle
from runtime.loader import measured_session
from runtime.opening import Opening, open_version
from soa.errors import SoaPipelineError
from stages.benchmark import bound_call
from stages.reference.answers import Reference
from stages.reference.nonfinite import label

_SECONDS = 4.0
_ROWS = 1000
_KINDS = {
    "memory asked for and given back": r"\[k\]|malloc|free|memset",
    "copies": r"memcpy|memmove|copy_kernel",
    "exp, log, tanh …": r"Sleef",
    "products, convolutions": r"gemm|addmm|_b?mm_|convolution|dnnl|mkldnn|jit|JIT|anon",
    "ONNX Runtime": r"onnxruntime",
    "Inductor's other kernels": r"cpp_fused",
    "torch's calls": r"torch|c10",
}
"""Kinds of functions, each with a pattern for the names of a library and a function.

The first pattern that matches counts.
"""


def profile(bundle: Bundle) -> None:
    """Print where a call spends its time, at the largest size of at most `_ROWS` rows."""
    opened = open_version(Opening(bundle.path, mode="test"))
    target = chosen_target(opened)
    inputs = Reference.load(bundle.file(bundle.manifest.reference)).inputs
    case = [c for c in sizes(opened.signature) if max(c.values()) <= _ROWS][-1]
    record = bundle.manifest.targets[target]
    made_by = record.engine_at(label(case))
    found = sampled(bound_call(measured_session(opened, target), inputs, case))
    kinds: Counter[str] = Counter()
    for name, count in found.items():
        found_in = (kind for kind, words in _KINDS.items() if re.search(words, name))
        kinds[next(found_in, "the rest")] += count
    table = new_table(f"{bundle.manifest.name}, {label(case)}, {made_by}", "what", "share")
    for kind, count in kinds.most_common():
        table.add_row(kind, f"{count / found.total():.0%}")
    show([table])


def sampled(call: Callable[[], object]) -> Counter[str]:
    """Repeat `call`; return the number of samples in each library and function."""
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "perf.data"
        watched = subprocess.Popen(
            ["perf", "record", "-q", "-e", "cpu-clock", "-F", "997", "-o", str(data),
             "-p", str(os.getpid())],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        end = time.perf_counter() + _SECONDS
        while time.perf_counter() < end:
            call()
        watched.send_signal(signal.SIGINT)
        _, said = watched.communicate()
        if not data.is_file():
            raise SystemExit(f"perf recorded nothing: {said.decode().strip()}")
        printed = subprocess.run(
            ["perf", "report", "-q", "-i", str(data), "--stdio", "--sort", "dso,symbol",
             "--fields", "sample,dso,symbol", "-t", "|"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    found: Counter[str] = Counter()
    for line in printed.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) >= 3 and fields[0].isdigit():
            found[f"{Path(fields[1]).name} {fields[2]}"] += int(fields[0])
    return found


def main(configs: list[Path], work: Path) -> None:
    if shutil.which("perf") is None:
        raise SystemExit("perf is not installed: the package linux-perf, or linux-tools, has it")
    torch.set_num_threads(1)
    print_machine()
    with tempfile.TemporaryDirectory() as place:
        registry = new_registry(Path(place))
        for config in configs:
            try:
                profile(built(config, registry, work / config.stem)[0])
            except SoaPipelineError as error:
                print(f"without {config.stem}: {error}", flush=True)


if __name__ == "__main__":
    with asked() as given:
        main(given.configs, given.work)
