"""Targets that this host lacks: `python -m benchmarks.speed.devices [CONFIG ...] [--target T ...]`.

The engine `lanes` compiles each network for each target; then an emulator runs the artifact on the
reference. A row has the compile time, the size of the code, the compiler's numbers of a kernel
(registers and bytes of local memory for each thread, how many of these bytes are spilled, bytes of
shared memory for each block, and the occupancy that registers and memory allow), the verdict of the
validation with the largest deviation, and the first digits of the digest of the answers. Equal
digests mean equal bits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.speed.zoo import CONFIGS
from engines import EngineError, Portable, Target, engine
from engines.base import FACTS
from engines.target import torch_runs
from pipeline.config import load_config, reference_inputs, source_of, tolerances_of
from runtime.checked import Tolerance
from stages.capture import Capture, capture
from stages.judging import Trial, emulate_candidate, validate_candidate
from stages.model import build_model
from stages.reports import ValidationReport

TARGETS = (
    "cpu/x86-64-v3", "cpu/armv8.2-a", "cuda/sm_80", "cuda/sm_90", "cuda/sm_100", "rocm/gfx90a",
    "rocm/gfx942", "rocm/gfx1100",
)  # fmt: skip
FACTS_OF_KERNELS = {"registers": "registers", "local": "local_bytes", "spilled": "spilled_bytes",
                    "shared": "shared_bytes"}  # fmt: skip
_LIMIT_S = 1800.0


def main(configs: list[Path], targets: list[str]) -> None:
    heads = ("network", "target", "seconds", "kB", *FACTS_OF_KERNELS, "occupancy", "verdict",
             "largest", "bits")  # fmt: skip
    print("|", " | ".join(heads), "|\n|", " --- |" * len(heads))
    for config in configs:
        with tempfile.TemporaryDirectory() as place:
            captured, tolerances = captured_from(config, Path(place))
            for target in targets:
                row(config.stem, captured, tolerances, Target.parse(target), Path(place) / target)


def captured_from(config: Path, folder: Path) -> tuple[Capture, Mapping[str, Tolerance]]:
    found = load_config(config)
    signature = found.signature()
    model, inputs = build_model(source_of(found)), reference_inputs(found, signature)
    made = capture(model, signature, inputs, folder, "none", nonfinite=found.reference.nonfinite)
    return made, tolerances_of(found, signature)


def row(
    name: str, made: Capture, tolerances: Mapping[str, Tolerance], target: Target, out: Path
) -> None:
    out.mkdir(parents=True)
    begun = time.monotonic()
    try:
        files = engine("lanes").compile(Portable(made.program, None), target, {}, out)
    except EngineError as error:
        print(f"| {name} | {target} | {time.monotonic() - begun:.1f} | {error} |", flush=True)
        return
    seconds = time.monotonic() - begun
    facts = json.loads((out / FACTS).read_text()) if FACTS in files else {}
    code = out / ("network.image" if facts else "network.so")
    report = judged(made, tolerances, target, out / files[0], out / "child")
    largest = max((each.max_abs for each in report.worst.values()), default=0.0)
    cells = (name, target, f"{seconds:.1f}", code.stat().st_size >> 10,
             *(facts.get(name, "") for name in FACTS_OF_KERNELS.values()),
             f"{facts['occupancy']:.0%}" if facts else "", report.verdict, f"{largest:.1g}",
             str(report.bits)[:8])  # fmt: skip
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def judged(
    made: Capture, tolerances: Mapping[str, Tolerance], target: Target, file: Path, scratch: Path
) -> ValidationReport:
    trial = Trial("lanes", file, made.signature, made.reference, tolerances)
    if torch_runs(target):
        return validate_candidate(trial, scratch, _LIMIT_S, target.device)
    return emulate_candidate(trial, scratch, _LIMIT_S, target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="*", type=Path, default=sorted(CONFIGS.glob("zoo/*.yaml")))
    parser.add_argument("--target", action="append", help="by default eight targets")
    asked = parser.parse_args()
    main(asked.configs, asked.target or list(TARGETS))
