"""Validate and time artifacts on a GPU: `python -m benchmarks.speed.gpu [CONFIG ...]`.

`make gpu` runs the tests marked `cuda` first; it needs no internet access. Each network is
captured, built by every engine for this host's GPU, validated on it against its reference, and
timed from columns to columns in the GPU's memory. The bits of `lanes` are compared with those of
its artifact for this host's processor. Three other ways are timed too: the eager model and
torch.compile on the same columns, and a way with copies, which packs columns in the host's memory
into rows, and copies these to the GPU and the answers back. With `--device cpu` it runs on the
host, as a test.

With `--turns FILE` several such processes prepare their networks at once, and take turns to time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from filelock import FileLock

from benchmarks.speed.zoo import CONFIGS
from benchmarks.table import SPREAD, print_machine, print_panels, race_panel
from engines import Portable, Target, engine
from engines.errors import first_line
from engines.target import gpu_target
from pipeline.config import load_config, reference_inputs, source_of, tolerances_of
from runtime.checked import Tolerance
from runtime.session import Session
from stages.capture import Capture, capture
from stages.compile import artifact_file
from stages.judging import Trial, validate_candidate
from stages.model import build_model
from stages.reference import Case
from stages.reports import ValidationReport
from stages.timing import bind_call, ladder, race, row_major_call

ENGINES = ("lanes", "aoti", "onnxruntime", "tensorrt")
_EAGER = "eager"
_LIMIT_S = 600.0
_MOST_ROWS = 1_000_000


def main(
    configs: list[Path], device: torch.device, seconds: float, turns: Path | None = None
) -> None:
    torch.set_num_threads(1)
    print_machine()
    for config in configs:
        with tempfile.TemporaryDirectory() as scratch:
            captured, tolerances = captured_from(config, Path(scratch))
            sessions = valid_sessions(captured, tolerances, device, Path(scratch))
            prepared = ways(config, captured, sessions, device)
            with nullcontext() if turns is None else FileLock(turns):
                races = {n: race(make(), seconds, stay=()) for n, make in prepared.items()}
        caption = f"{config.stem} on {device}, from columns to columns; {SPREAD}."
        print_panels(caption, [race_panel(config.stem, "rows", races, _EAGER)])


def captured_from(file: Path, folder: Path) -> tuple[Capture, Mapping[str, Tolerance]]:
    """The network of a config, captured with its reference, and the tolerances of its answers."""
    config = load_config(file)
    signature = config.signature()
    model, inputs = build_model(source_of(config)), reference_inputs(config, signature)
    nonfinite = config.reference.nonfinite
    captured = capture(model, signature, inputs, folder, "none", nonfinite=nonfinite)
    return captured, tolerances_of(config, signature)


def valid_sessions(
    captured: Capture, tolerances: Mapping[str, Tolerance], device: torch.device, folder: Path
) -> dict[str, Session]:
    """A session of each engine whose artifact is valid on the device. Prints each verdict."""
    sessions: dict[str, Session] = {}
    for name in ENGINES:
        try:
            file, report = judged(name, captured, tolerances, device, folder)
            worst = max((each.max_abs for each in report.worst.values()), default=0.0)
            line = f"{name}: {report.verdict}, largest deviation {worst:.1g}"
            if name == "lanes" and device.type != "cpu":
                _, on_cpu = judged(name, captured, tolerances, torch.device("cpu"), folder)
                line += f", {'the' if report.bits == on_cpu.bits else 'not the'} bits of the CPU"
            print(line if report.valid else f"{line}: {report.reason}", flush=True)
            if report.valid:
                executable = engine(name).open(file, device)
                sessions[name] = Session(captured.signature, executable, device, any_start=True)
        except Exception as error:  # whatever a compiler raises
            print(f"{name}: {first_line(error)}", flush=True)
    return sessions


def judged(
    name: str,
    captured: Capture,
    tolerances: Mapping[str, Tolerance],
    device: torch.device,
    folder: Path,
) -> tuple[Path, ValidationReport]:
    """An engine's artifact for a device of this host, and its verdict."""
    target = Target.parse("cpu") if device.type == "cpu" else gpu_target(device.index or 0)
    out = folder / device.type / name
    out.mkdir(parents=True)
    source = Portable(captured.program, captured.script)
    files = engine(name).compile(source, target, {}, out)
    file = artifact_file(name, tuple(files), out, captured)
    trial = Trial(name, file, captured.signature, captured.reference, tolerances)
    return file, validate_candidate(trial, out / "child", _LIMIT_S, str(device))


def ways(
    file: Path, captured: Capture, sessions: Mapping[str, Session], device: torch.device
) -> dict[int, Callable[[], dict[str, Callable[[], None]]]]:
    """For each number of rows in the first row dimension, a function that makes all ways to time.
    Every way has run once, so that all is compiled."""
    config, signature = load_config(file), captured.signature
    inputs = reference_inputs(config, signature)
    model = build_model(source_of(config)).to(device)
    compiled = torch.compile(model, dynamic=True)

    def runs(case: Case) -> dict[str, Callable[[], None]]:
        return {
            _EAGER: row_major_call(signature, model, inputs, case, device),
            "torch.compile": row_major_call(signature, compiled, inputs, case, device),
            "with copies": row_major_call(signature, on_host_rows(model, device), inputs, case),
            **{name: bind_call(each, inputs, case) for name, each in sessions.items()},
        }

    cases = [case for case in ladder(signature) if max(case.values()) <= _MOST_ROWS]
    for case in cases:
        for run in runs(case).values():
            run()
    return {next(iter(case.values())): partial(runs, case) for case in cases}


def on_host_rows(model: torch.nn.Module, device: torch.device) -> Callable[..., object]:
    """The model on rows in the host's memory. Unpacking an answer copies it back."""
    return lambda *rows: model(*(tensor.to(device) for tensor in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    every = [CONFIGS / "demo.yaml", *sorted(CONFIGS.glob("zoo/*.yaml"))]
    parser.add_argument("configs", nargs="*", type=Path, default=every)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each race")
    parser.add_argument("--turns", type=Path, help="a file that such processes lock in turn")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type != "cpu" and torch.cuda.device_count() <= (device.index or 0):
        sys.exit(f"{device} is not here: torch sees {torch.cuda.device_count()} GPUs")
    main(options.configs, device, options.seconds, options.turns)
