"""Artifacts without torch beside the other engines: `python -m benchmarks.standalone [CONFIG ...]`.

Each config goes through `pipeline run` for x86-64-v3, which takes half of the compile time of
`cpu`. Then every valid candidate races at each size, in one thread, from SoA columns to SoA
columns. Ratios are to the first row. The lines below a table give the choice, the compile times and
the reasons of refusals.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import yaml

from benchmarks.table import SPREAD, Panel, print_machine, print_panels, race_panel
from benchmarks.zoo import CONFIGS, built, new_registry
from registry.bundle.bundle import Bundle
from runtime.loader import measured_session
from runtime.opening import Opening, open_version
from soa.errors import SoaPipelineError
from stages.benchmark import benchmark_cases, bound_call, race
from stages.reference.answers import Reference

ENGINES = ("lanes", "aoti", "onnxruntime", "aoti-standalone")
SIZES = (1, 10, 100, 1000)
_SECONDS = 3.0


def main(configs: list[Path]) -> None:
    torch.set_num_threads(1)
    print_machine()
    print(f"One call, one thread; x: to the first row; {SPREAD}.")
    with tempfile.TemporaryDirectory() as place:
        registry = new_registry(Path(place))
        for config in configs:
            # Written next to the original, because paths in it are relative to its folder.
            text = yaml.safe_load(config.read_text())
            text |= {"engines": list(ENGINES), "targets": ["cpu/x86-64-v3"]}
            copy = config.with_name(f".{config.stem}.standalone.yaml")
            try:
                copy.write_text(yaml.safe_dump(text, sort_keys=False))
                bundle, _ = built(copy, registry, Path(place) / config.stem)
                print_panels("", [measure(bundle)])
                print(costs(bundle), flush=True)
            except SoaPipelineError as error:
                print(f"without {config.stem}: {error}", flush=True)
            finally:
                copy.unlink()


def measure(bundle: Bundle) -> Panel:
    """All valid candidates, at all sizes."""
    opened = open_version(Opening(bundle.path, mode="test"))
    signature = opened.signature
    inputs = Reference.load(bundle.file(bundle.manifest.reference)).inputs
    sessions = {
        name: measured_session(opened, target, name)
        for target, record in bundle.manifest.targets.items()
        for name, found in record.candidates.items()
        if found.status == "valid"
    }
    cases = benchmark_cases(signature)
    if len(signature.dims) == 1:
        (dim,) = signature.dims
        cases = [{dim: n} for n in SIZES if n <= signature.ranges[dim].max]
    races = {}
    for case in cases:
        runs = {name: bound_call(session, inputs, case) for name, session in sessions.items()}
        races[max(case.values())] = race(runs, _SECONDS)
    return race_panel(bundle.manifest.name, "rows", races, next(iter(sessions)))


def costs(bundle: Bundle) -> str:
    """For each target: the choice, and the seconds of each compiler or why it was refused."""
    lines = []
    for target, record in bundle.manifest.targets.items():
        found = [
            f"{name} {candidate.reason or f'{candidate.compile_seconds or 0:.0f} s'}"
            for name, candidate in record.candidates.items()
        ]
        lines.append(f"{target}: chosen {record.choice()}; {', '.join(found)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    zoo = sorted((CONFIGS / "zoo").glob("*.yaml"))
    known = [*zoo, CONFIGS / "demo.yaml", CONFIGS / "particlenet.yaml"]
    main([Path(name) for name in sys.argv[1:]] or known)
