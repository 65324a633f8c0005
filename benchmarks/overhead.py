"""What a call costs beside the model's kernels: `python -m benchmarks.overhead`.

A small MLP (6 → 48 → 3) on tiny events. Every contestant has its inputs where it likes them best,
bound or row-major; no conversion is inside these times (benchmarks.copies has those).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.subject import Subject, subject
from benchmarks.table import print_machine, print_race
from engines.torch_quiet import quiet_torch
from stages.benchmark import race

_MANY = 64


def main() -> None:
    torch.set_num_threads(1)
    print_machine()
    made = subject(features=6, highest=4096)
    session = made.session()
    tuned = made.session(max_autotune=True)
    row_major = row_major_package(made)
    columns = {}
    for n in (1, 10, 100, 1000):
        runs: dict[str, Callable[[], object]] = {}
        runs["bound call (ours)"] = session.bind(*made.collections(n))
        runs["bound call, max_autotune (ours)"] = tuned.bind(*made.collections(n))
        bindings = [session.bind(*made.collections(n)) for _ in range(_MANY)]
        runs[f"run_many of {_MANY} (ours)"] = partial(session.run_many, bindings)
        runs |= _torch_ways(made, row_major, n)
        runs |= _onnxruntime_ways(made, n)
        timed = race(runs, seconds=2.0)
        many = f"run_many of {_MANY} (ours)"
        t = timed[many]
        timed["run_many, an event (ours)"] = type(t)(
            t.median_us / _MANY, t.p05_us / _MANY, t.p95_us / _MANY, t.rounds
        )
        del timed[many]
        columns[f"n={n}"] = timed
    title = "one call: median (p05 … p95), ratio to the bound call"
    print_race(title, columns, "bound call (ours)")


def row_major_package(made: Subject, highest: int = 4096) -> str:
    """Plain AOTInductor, compiled on contiguous rows: what a user would build alone."""
    path = str(made.folder / "row_major.pt2")
    rows = torch.export.Dim("rows", min=0, max=highest)
    example = torch.randn(37, len(made.names))
    with quiet_torch():
        exported = torch.export.export(
            made.model, (example,), dynamic_shapes=({0: rows},), strict=False
        )
        torch._inductor.aoti_compile_and_package(
            exported, package_path=path, inductor_configs={"cpp.threads": 1}
        )
    return path


def _torch_ways(made: Subject, package: str, n: int) -> dict[str, Callable[[], object]]:
    rows = torch.randn(n, 6)
    compiled = torch._inductor.aoti_load_package(package)
    loader = compiled.loader
    with quiet_torch():
        scripted = torch.jit.freeze(torch.jit.script(made.model))

    def script() -> None:
        with torch.no_grad():
            scripted(rows)

    def eager() -> None:
        with torch.no_grad():
            made.model(rows)

    return {
        "AOTICompiledModel, row-major": lambda: compiled(rows),
        "loader.run, row-major": lambda: loader.run([rows]),
        "TorchScript, row-major": script,
        "eager, row-major": eager,
    }


def _onnxruntime_ways(made: Subject, n: int) -> dict[str, Callable[[], object]]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch's ONNX exporter needs it
    except ImportError:
        print("onnxruntime or onnxscript is not installed: left out")
        return {}
    path = made.folder / "row_major.onnx"
    if not path.exists():
        rows_dim = torch.export.Dim("rows", min=0, max=4096)
        with quiet_torch():
            torch.onnx.export(
                made.model, (torch.randn(37, 6),), str(path), dynamo=True, verbose=False,
                dynamic_shapes=({0: rows_dim},), external_data=False,
            )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    rows = torch.randn(n, 6)
    array = rows.numpy()
    name, out = session.get_inputs()[0].name, session.get_outputs()[0].name
    answer = torch.empty(n, 3)
    binding = session.io_binding()
    binding.bind_input(name, "cpu", 0, array.dtype, array.shape, rows.data_ptr())
    binding.bind_output(out, "cpu", 0, array.dtype, (n, 3), answer.data_ptr())
    memory = (rows, answer)  # the binding holds bare addresses

    def bound() -> object:
        assert memory
        return session.run_with_iobinding(binding)

    return {
        "ONNX Runtime, row-major": lambda: session.run([out], {name: array}),
        "ONNX Runtime with I/O binding, row-major": bound,
    }


if __name__ == "__main__":
    main()
