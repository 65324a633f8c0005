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
    mlp = subject(features=6, highest=4096)
    ours = {_OURS: mlp.session("lanes"), "ours, bound, aoti": mlp.session("aoti")}
    print_panels(CAPTION, [measure(mlp, ours, (1, 10, 100, 1000), seconds=2.0)])


def measure(
    mlp: Subject, sessions: Mapping[str, Session], sizes: Sequence[int], seconds: float
) -> Panel:
    """Time all contestants. `sessions`: ours by name; ratios are relative to the first."""
    compiled = aoti_package(mlp.model, mlp.signature, mlp.inputs, mlp.folder)
    with quiet_torch():
        scripted = torch.jit.freeze(torch.jit.script(mlp.model))
    onnx = onnx_session(mlp.model, mlp.signature, mlp.inputs, mlp.folder)
    base = next(iter(sessions))
    races = {}
    for n in sizes:
        runs: dict[str, Callable[[], object]] = {
            name: session.bind(*mlp.collections(n)) for name, session in sessions.items()
        }
        with _telemetry(mlp.folder):
            runs[f"{base}, with telemetry"] = sessions[base].bind(*mlp.collections(n))
        bindings = [sessions[base].bind(*mlp.collections(n)) for _ in range(_MANY)]
        many = f"ours, run_many of {_MANY}, an event"
        runs[many] = partial(sessions[base].run_many, bindings)
        runs |= _torch_ways(mlp, compiled, scripted, n)
        if onnx is not None:
            runs |= _onnx_ways(onnx, mlp, n)
        races[n] = race(runs, seconds)
        races[n][many] = _of_one(races[n][many], _MANY)
    return race_panel("", "rows", races, base)


def _of_one(timing: Timing, events: int) -> Timing:
    """The time of an event, from the time of a call of several."""
    times = (timing.median_us, timing.p05_us, timing.p95_us)
    median, p05, p95 = (time / events for time in times)
    return Timing(median, p05, p95, timing.rounds)


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
    mlp: Subject, compiled: Any, scripted: torch.nn.Module, n: int
) -> dict[str, Callable[[], object]]:
    """Calls of torch's runtimes on n rows."""
    rows = torch.randn(n, len(mlp.inputs["inputs"]))
    loader = compiled.loader

    def without_grad(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model(rows)

    return {
        "AOTICompiledModel": lambda: compiled(rows),
        "loader.run": lambda: loader.run([rows]),
        "TorchScript": partial(without_grad, scripted),
        "eager": partial(without_grad, mlp.model),
    }


def _onnx_ways(session: Any, mlp: Subject, n: int) -> dict[str, Callable[[], object]]:
    """Calls of ONNX Runtime on n rows: with new memory for the answers, and with bound memory."""
    rows = torch.randn(n, len(mlp.inputs["inputs"]))
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
