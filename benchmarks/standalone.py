"""Artifacts without torch beside the others: `python -m benchmarks.standalone [CONFIG ...]`.

Each config goes through `pipeline run` with the engines of AOTInductor alone. A table for each: the
seconds that a candidate took to compile, and the time of one call, side by side, at each size; then
whether the standalone artifacts of both levels give the same bits, and which levels a candidate is
valid for.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import yaml

from benchmarks.zoo import CONFIGS, built, new_registry
from registry.bundle.bundle import Bundle
from runtime.loader import measured_session
from runtime.opening import Opening, open_version
from runtime.session import Session
from soa.errors import SoaPipelineError
from stages.benchmark import benchmark_cases, bound_call, race
from stages.reference.answers import Arrays, Case, Reference, filled_collections, label

ENGINES = ("aoti", "aoti-autotune", "aoti-folded", "aoti-standalone")
SIZES = (1, 10, 100, 1000)


def main(configs: list[Path]) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        registry = new_registry(Path(place))
        for config in configs:
            # Beside the original, since its paths are relative to that.
            text = yaml.safe_load(config.read_text())
            text["engines"] = list(ENGINES)
            copy = config.with_name(f".{config.stem}.standalone.yaml")
            try:
                copy.write_text(yaml.safe_dump(text, sort_keys=False))
                bundle, _ = built(copy, registry, Path(place) / config.stem)
                report(bundle)
            except SoaPipelineError as error:
                print(f"without {config.stem}: {error}", flush=True)
            finally:
                copy.unlink()


def report(bundle: Bundle) -> None:
    opened = open_version(Opening(bundle.path, mode="test"))
    signature = opened.signature
    inputs = Reference.load(bundle.file(bundle.manifest.reference)).inputs
    print(f"\n{bundle.manifest.name}")
    sessions: dict[str, Session] = {}
    for target, record in bundle.manifest.targets.items():
        print(f"  {target}: chosen {record.choice()}")
        for name, found in record.candidates.items():
            seconds = f"{found.compile_seconds or 0:.0f} s"
            print(f"    {name}: {found.status}, {seconds}, tile {found.tile} {found.reason or ''}")
            if found.status == "valid":
                sessions[f"{name} {target[-2:]}"] = measured_session(opened, target, name)
    cases = benchmark_cases(signature)
    if len(signature.dims) == 1:
        (dim,) = signature.dims
        cases = [{dim: n} for n in SIZES if n <= signature.ranges[dim].max]
    for case in cases:
        runs = {name: bound_call(session, inputs, case) for name, session in sessions.items()}
        times = race(runs, 2.0)
        row = "  ".join(f"{name} {time.median_us:.4g}" for name, time in times.items())
        print(f"  {label(case)}: {row}", flush=True)
    both = [session for name, session in sessions.items() if name.startswith("aoti-standalone")]
    if len(both) == 2:
        same = [outputs(both[0], inputs, case) == outputs(both[1], inputs, case) for case in cases]
        print(f"  the bits of v3 and v4 are {'the same' if all(same) else 'OTHERS'}", flush=True)


def outputs(session: Session, inputs: Arrays, case: Case) -> bytes:
    given, written = filled_collections(session.signature, inputs, case, torch.device("cpu"))
    session.bind(given, written)()
    return b"".join(
        np.ascontiguousarray(collection[member.name]).tobytes()
        for collection in written.values()
        for member in collection.layout.columns
    )


if __name__ == "__main__":
    zoo = [*sorted((CONFIGS / "zoo").glob("*.yaml")), CONFIGS / "demo.yaml"]
    main([Path(name) for name in sys.argv[1:]] or zoo)
