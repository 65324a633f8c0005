"""Time every model of the zoo beside its peers: `python -m benchmarks.speed.zoo [CONFIG ...]`.

With `--unseen`: the networks of benchmarks/speed/unseen.py instead; nothing was tuned on them.

Each config goes through `pipeline run`. Then the pipeline's choice races against the eager model,
and against artifacts that a user would build by hand. Every way starts from SoA columns and ends in
SoA columns, so its time includes every copy that it needs. A way that takes more than a few seconds
for a call is left out, and its name is printed. OpenVINO and JAX take part if they can be imported.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.row_major import aoti_package, onnx, onnx_session, openvino
from benchmarks.speed.in_jax import in_jax
from benchmarks.speed.unseen import SHAPES, write_configs
from benchmarks.subject import one_core
from benchmarks.table import WIDTH, print_machine, spread
from engines.aoti.build import TARGET, unpack
from engines.base import Executable
from engines.exported import quiet_torch
from engines.native import NativeExecutable
from engines.target import host_targets
from pipeline.building.run_config import run
from pipeline.config import load_config
from pipeline.config.assemble import source_of
from pipeline.report.tables import Table, microseconds, new_table, show
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from runtime.loader import open_measured_session
from runtime.opening import Opening, open_version
from runtime.opening.target_choice import choose
from runtime.session import Session
from soa.errors import SoaPipelineError
from soa.signature import Signature
from stages.model.source import build_model
from stages.reference.answers import Arrays, Reference, row_major_inputs
from stages.reference.nonfinite import Case, label
from stages.reports import EAGER, Timing
from stages.timing import benchmark_cases, bind_call, ladder, race, row_major_call

CONFIGS = Path(__file__).parents[2] / "configs"
_CHOSEN = "ours"
_SECONDS = 1.0
_TOO_LONG_S = 3.0

T = TypeVar("T")
Races = Mapping[int, Mapping[str, Timing]]
"""By row count and name: the time of a way."""


def main(configs: list[Path], scratch: Path) -> None:
    torch.set_num_threads(1)
    print_machine()
    registry = Registry(f"sqlite:///{scratch}/registry.db")
    bundles: dict[Path, Bundle] = {}
    # Numbered, since two configs may have the same name.
    folders = {config: scratch / f"{i}-{config.stem}" for i, config in enumerate(configs)}
    for config, folder in folders.items():  # all before the first call of JAX: builds fork
        folder.mkdir()
        with _left_out_if_refused(config):
            bundles[config] = run(config, registry, folder / "work").bundle
    races_of: dict[str, Races] = {}
    for config, bundle in bundles.items():
        with _left_out_if_refused(config):
            races_of[bundle.manifest.name] = measure(config, bundle, folders[config])
    show([beside_peers(races_of)], WIDTH)


@contextmanager
def _left_out_if_refused(config: Path) -> Iterator[None]:
    """Goes on after an error of ours about a config, which it prints."""
    try:
        yield
    except SoaPipelineError as error:
        print(f"without {config.stem}: {error}", flush=True)


def measure(config: Path, bundle: Bundle, folder: Path) -> Races:
    """Time all ways at all sizes."""
    opened = open_version(Opening(bundle.path, mode="test"))
    signature = opened.signature
    inputs = Reference.load(bundle.file(bundle.manifest.reference)).inputs
    model = build_model(source_of(load_config(config))).eval()
    sessions = {
        _CHOSEN: open_measured_session(opened, choose(opened, torch.device("cpu"), None)),
        "AOTI on columns, by hand": Session(signature, by_hand_in_place(bundle, folder)),
    }
    by_hand = ways_by_hand(model, signature, inputs, folder)
    races: dict[int, Mapping[str, Timing]] = {}
    with one_core():  # JAX keeps to one thread in no other way
        for case in ladder(signature):
            runs: dict[str, Callable[[], object]] = {
                name: bind_call(session, inputs, case) for name, session in sessions.items()
            }
            for name, way in by_hand.items():
                runs[name] = row_major_call(signature, way, inputs, case)
                with quiet_torch():
                    runs[name]()  # not timed: torch.compile compiles in this call
            make = partial(in_jax, config.stem, model, signature, inputs, case)
            jax = _or_reason("JAX", make)
            if jax is not None:
                runs["JAX, columns"] = jax
            races[max(case.values())] = race(_quick_enough(runs, case), _SECONDS)
    return races


def by_hand_in_place(bundle: Bundle, folder: Path) -> Executable:
    """The captured program, compiled by plain AOTInductor for this host."""
    path = folder / "in_place.pt2"
    program = torch.export.load(bundle.file(bundle.manifest.program))
    with quiet_torch():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"cpp.threads": 1}
        )
    (folder / "in_place").mkdir()
    (library, *_) = unpack(path, folder / "in_place")
    (folder / "in_place" / TARGET).write_text(f"soa-target 1\n{host_targets('cpu')[0]}\n")
    return NativeExecutable(folder / "in_place" / library, "cpu")


def _quick_enough(
    runs: Mapping[str, Callable[[], object]], case: Case
) -> dict[str, Callable[[], object]]:
    """The ways whose call is fast enough, and always the choice. Prints the names of the others."""
    quick: dict[str, Callable[[], object]] = {}
    for name, call in runs.items():
        begun = time.perf_counter()
        call()
        seconds = time.perf_counter() - begun
        if seconds > _TOO_LONG_S and name != _CHOSEN:
            print(f"without {name} at {label(case)}: {seconds:.1f} s a call")
        else:
            quick[name] = call
    return quick


def ways_by_hand(
    model: torch.nn.Module, signature: Signature, inputs: Arrays, folder: Path
) -> dict[str, Callable[..., Any]]:
    """The model on row-major tensors, as a user would build it by hand in several ways.

    A way that fails is left out, and the reason is printed.
    """
    case = benchmark_cases(signature)[-1]
    example = tuple(row_major_inputs(signature, inputs, case))
    makers: Mapping[str, Callable[[], Callable[..., Any] | None]] = {
        "torch.compile, row-major": lambda: torch.compile(model, dynamic=True),
        "torch.compile, max-autotune, row-major": lambda: torch.compile(
            model, dynamic=False, options={"max_autotune": True, "freezing": True}
        ),
        "TorchScript, row-major": lambda: _scripted(model, example),
        "AOTI, row-major": lambda: _positional(
            aoti_package(model, signature, inputs, folder).loader.run
        ),
        "ONNX Runtime, row-major": lambda: _onnx(model, signature, inputs, folder),
        "OpenVINO, row-major": lambda: _positional(openvino(model, signature, inputs)),
    }
    ways: dict[str, Callable[..., Any]] = {EAGER: model}
    for name, make in makers.items():
        way = _or_reason(name, partial(_called_once, make, example))
        if way is not None:
            ways[name] = way
    return ways


def _or_reason(name: str, make: Callable[[], T | None]) -> T | None:
    """What `make` makes. If it fails, prints the reason and returns None."""
    try:
        with quiet_torch(), torch.no_grad():
            return make()
    except Exception as error:  # peers name no common type for what they cannot compile
        print(f"without {name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
        return None


def _called_once(
    make: Callable[[], Callable[..., Any] | None], example: tuple[torch.Tensor, ...]
) -> Callable[..., Any] | None:
    """A way that has been called: some compile, or fail, in the first call."""
    way = make()
    if way is not None:
        way(*example)
    return way


def _scripted(model: torch.nn.Module, example: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
    """The model as frozen TorchScript."""
    frozen: Callable[..., Any]
    try:
        frozen = torch.jit.freeze(torch.jit.script(model))
    except Exception:  # of any type, if the model cannot be scripted: trace it
        frozen = torch.jit.freeze(torch.jit.trace(model, example, check_trace=False))
    return frozen


def _onnx(
    model: torch.nn.Module, signature: Signature, inputs: Arrays, folder: Path
) -> Callable[..., Any] | None:
    """A session of ONNX Runtime; None if torch cannot export the model."""
    session = onnx_session(model, signature, inputs, folder)
    return None if session is None else _positional(onnx(session))


def _positional(run_list: Callable[[list[torch.Tensor]], Any]) -> Callable[..., Any]:
    """A function of a list as one of positional arguments."""
    return lambda *tensors: run_list(list(tensors))


def beside_peers(races_of: Mapping[str, Races]) -> Table:
    """For each network and size: the time of the choice with its spread, and the ratio to it of the
    best way by hand. `races_of`: by network."""
    sizes = sorted({n for races in races_of.values() for n in races})
    title = "ours and its spread; the best peer / ours"
    table = new_table(title, "", *(f"n = {n:,}" for n in sizes))
    for name, races in races_of.items():
        table.add_row(name, *(_beside_best(races[n]) if n in races else "" for n in sizes))
    return table


def _beside_best(timed: Mapping[str, Timing]) -> str:
    """A cell of `beside_peers`."""
    ours = timed[_CHOSEN]
    best = min((name for name in timed if name != _CHOSEN), key=lambda name: timed[name].median_us)
    ratio = timed[best].median_us / ours.median_us
    return f"{microseconds(ours.median_us)} {spread(ours)} {ratio:.2f} {best.partition(',')[0]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="*", help="files, or names with --unseen; none: all")
    parser.add_argument("--unseen", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        configs = [Path(name) for name in options.configs] or sorted(CONFIGS.glob("zoo/*.yaml"))
        if options.unseen:
            names = options.configs or SHAPES
            configs = [path for path in write_configs(Path(folder)) if path.stem in names]
        main(configs, Path(folder))
