"""The overhead of a call: `python -m benchmarks.speed.overhead`.

A small MLP (6 → 48 → 3) runs on few rows, so its kernels take little of the time. Each contestant
gets its inputs in the form that it needs, as bound columns or as row-major tensors: the times
contain no conversion (benchmarks.speed.copies times those).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.row_major import aoti_package, onnx_session
from benchmarks.subject import Subject, subject
from benchmarks.table import SPREAD, Panel, print_machine, print_panels, race_panel
from engines.exported import quiet_torch
from runtime.session.session import Session
from runtime.session.telemetry import VARIABLE, telemetry
from stages.reports import Timing
from stages.timing import race

CAPTION = f"One call of a small MLP; all but ours take row-major tensors.\nx: to ours; {SPREAD}."
_OURS = "ours, bound"
_MANY = 64


def main() -> None:
    torch.set_num_threads(1)
    print_machine()
    made = subject(features=6, highest=4096)
    ours = {_OURS: made.session("lanes"), "ours, bound, aoti": made.session("aoti")}
    panels = [measure(made, ours, (1, 10, 100, 1000), seconds=2.0)]
    print_panels(CAPTION, panels)


def measure(
    made: Subject, sessions: Mapping[str, Session], sizes: Sequence[int], seconds: float
) -> Panel:
    """Time all contestants. `sessions`: ours by name; ratios are relative to the first."""
    compiled = aoti_package(made.model, made.signature, made.inputs, made.folder)
    with quiet_torch():
        scripted = torch.jit.freeze(torch.jit.script(made.model))
    onnx = onnx_session(made.model, made.signature, made.inputs, made.folder)
    base = next(iter(sessions))
    races = {}
    for n in sizes:
        runs: dict[str, Callable[[], object]] = {
            name: session.bind(*made.collections(n)) for name, session in sessions.items()
        }
        with _telemetry(made.folder):
            runs[f"{base}, with telemetry"] = sessions[base].bind(*made.collections(n))
        bindings = [sessions[base].bind(*made.collections(n)) for _ in range(_MANY)]
        many = f"ours, run_many of {_MANY}, an event"
        runs[many] = partial(sessions[base].run_many, bindings)
        runs |= _torch_ways(made, compiled, scripted, n)
        if onnx is not None:
            runs |= _onnx_ways(onnx, made, n)
        timed = race(runs, seconds)
        t = timed[many]
        timed[many] = Timing(t.median_us / _MANY, t.p05_us / _MANY, t.p95_us / _MANY, t.rounds)
        races[n] = timed
    return race_panel("", "rows", races, base)


@contextlib.contextmanager
def _telemetry(folder: Path) -> Iterator[None]:
    """Bindings made in this block count their calls; all others do not."""
    os.environ[VARIABLE] = str(folder / "calls.prom")
    telemetry.cache_clear()
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        telemetry.cache_clear()


def _torch_ways(
    made: Subject, compiled: Any, scripted: torch.nn.Module, n: int
) -> dict[str, Callable[[], object]]:
    rows = torch.randn(n, len(made.inputs["inputs"]))
    loader = compiled.loader

    def without_grad(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model(rows)

    return {
        "AOTICompiledModel": lambda: compiled(rows),
        "loader.run": lambda: loader.run([rows]),
        "TorchScript": partial(without_grad, scripted),
        "eager": partial(without_grad, made.model),
    }


def _onnx_ways(session: Any, made: Subject, n: int) -> dict[str, Callable[[], object]]:
    rows = torch.randn(n, len(made.inputs["inputs"]))
    array = rows.numpy()
    name, out = session.get_inputs()[0].name, session.get_outputs()[0].name
    answer = torch.empty(n, 3)
    binding = session.io_binding()
    binding.bind_input(name, "cpu", 0, array.dtype, array.shape, rows.data_ptr())
    binding.bind_output(out, "cpu", 0, array.dtype, (n, 3), answer.data_ptr())
    memory = (rows, answer)  # kept alive: the binding holds only addresses

    def bound() -> object:
        assert memory
        return session.run_with_iobinding(binding)

    return {
        "ONNX Runtime": lambda: session.run([out], {name: array}),
        "ONNX Runtime, I/O binding": bound,
    }


if __name__ == "__main__":
    main()
