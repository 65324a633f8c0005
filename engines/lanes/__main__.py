"""Prints what `lanes` makes of a model: the graph of one row, the tensors, the plan and the C++.

    python -m engines.lanes CONFIG        # or a program.pt2

For people who change this engine. It compiles nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from engines.lanes.compiling import choose_widths
from engines.lanes.planning import (
    Constants,
    Kernel,
    Plan,
    Step,
    formula,
    lower_row,
    make_plan,
    trace_row,
    write_source,
)
from engines.lanes.values import Tensor
from engines.target import Target
from soa.errors import SoaPipelineError
from soa.text import plain


def describe(program: Path, target: Target) -> Iterator[str]:
    """Compiles a program.pt2 as far as its C++, and yields a text on each stage: the graph of one
    row, the tensors, the plan and the C++."""
    row, arguments = trace_row(program)
    yield "=== graph of one row ===\n" + row.graph.print_readable(print_output=False)
    lowered = lower_row(row, arguments)
    plan = make_plan(lowered)
    names = {tensor: f"x{k}" for k, tensor in enumerate(lowered.tensors)}
    yield "=== tensors ==="
    yield from (_describe_tensor(plan, tensor, names) for tensor in lowered.tensors)
    yield f"=== plan: {plan.size} slots of 4 bytes a row ==="
    yield from (_describe_step(step, names) for step in plan.steps)
    yield "=== C++ ===\n" + write_source(plan, choose_widths(plan, target)).text


def _describe_tensor(plan: Plan, tensor: Tensor, names: dict[Tensor, str]) -> str:
    """The line on a tensor: its sources, dtype, shape, its place in the arena, and the line of the
    model that it comes from."""
    kind = type(tensor).__name__.lower()
    sources = ", ".join(names[source] for source in tensor.sources)
    place = f"slot {plan.places[tensor]}" if tensor in plan.places else "not stored"
    return (
        f"{names[tensor]} = {kind}({sources}): {tensor.dtype}{list(tensor.shape)}, {place}  "
        f"{tensor.line}"
    ).rstrip()


def _describe_step(step: Step, names: dict[Tensor, str]) -> str:
    """The line on a step of the plan. For a kernel it shows the loops, and what they compute and
    write."""
    if not isinstance(step, Kernel):
        return f"{names[step]} = {type(step).__name__.lower()} of {names[step.source]}"
    loops = "".join(f"for {loop.name} < {loop.extent}: " for loop in step.loops)
    place = ", ".join(formula(index, Constants()) for index in step.place)
    inner = "" if step.inner is None else f", with the sums of {names[step.inner]}"
    return f"{loops}{names[step.into]}[{place}] = {names[step.source]}{inner}"


def _export_program(config: Path, folder: Path) -> Path:
    """Writes the program.pt2 of a config's model into a folder, and returns its path.

    It imports `pipeline` and `stages` by name, since they are in layers above this package, which
    does not need them otherwise."""
    config_api, capture = import_module("pipeline.config"), import_module("stages.capture")
    settings = config_api.load_config(config)
    signature = settings.signature()
    model = import_module("stages.model").build_model(config_api.source_of(settings))
    model = model.train(False).requires_grad_(False)
    inputs = config_api.reference_inputs(settings, signature)
    arguments = capture.convention_arguments(signature, inputs, capture.example_case(signature))
    exported = capture.export_convention(model, signature, arguments)
    import_module("torch").export.save(exported, folder / "program.pt2")
    return folder / "program.pt2"


def main() -> int:
    """Prints a model at each stage of the compiler. Returns 1 after an error, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m engines.lanes", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("config", type=Path, help="a config, or a program.pt2")
    parser.add_argument("--target", default="cpu", help="a target for processors")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            program = arguments.config
            if program.suffix != ".pt2":
                program = _export_program(program, Path(scratch))
            for stage in describe(program, Target.parse(arguments.target)):
                sys.stdout.write(plain(stage, "\n") + "\n")
    except SoaPipelineError as error:
        sys.stderr.write(plain(error) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
