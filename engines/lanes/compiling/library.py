"""Builds a library from a captured program: the program for one row, its plan, C++, a compiler."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.errors import NotApplicableError
from engines.exported import name_of
from engines.lanes.compiling.compilers import compile_library
from engines.lanes.planning import (
    HEADERS,
    Kernel,
    Plan,
    Source,
    Step,
    Width,
    make_plan,
    make_row_program,
    vectors_in_l1,
    write_source,
)
from engines.lanes.tensors import Program
from engines.lanes.values import Tensor
from engines.target import Target

# By architecture: the lanes of a float32 vector, and the number of vector registers.
_VECTORS = {
    "x86-64-v2": (4, 16), "x86-64-v3": (8, 16), "x86-64-v4": (16, 32),
    "aarch64": (4, 32), "armv8.2-a": (4, 32),
}  # fmt: skip
_SHORT = 40_000  # a text of at most so many characters is compiled faster as a whole
_LARGEST = 256 << 20  # the most bytes that a thread may need for intermediate values


def build(program: Path, target: Target, out: Path) -> list[str]:
    """Build for `Engine.compile`. Writes network.so, network.cpp and target.txt."""
    return build_row(make_row_program(program), target, out)


def build_row(program: Program, target: Target, out: Path) -> list[str]:
    """As `build`, but takes the program for one row instead of a file."""
    _build_plan(make_plan(program), target, out)
    return ["network.so", "network.cpp", "target.txt"]


def _build_plan(plan: Plan, target: Target, out: Path, timed: bool = False) -> None:
    """Write the files of `build` for a plan. `timed`: see `write_source`."""
    widths = choose_widths(plan, target)
    _require_room(plan, widths)
    parts = 0 if timed else 1 + len(widths)
    _compile(write_source(plan, widths, timed), target, out, parts)
    (out / "target.txt").write_text(f"soa-target 1\n{target}\n")


def _require_room(plan: Plan, widths: Sequence[Width]) -> None:
    """Raise NotApplicableError if a thread would need too much memory for intermediate values."""
    needed = plan.row_bytes * max(width.lanes * width.vectors for width in widths)
    if needed > _LARGEST:
        raise NotApplicableError(
            f"its intermediate values take {needed >> 20} MB a thread, more than "
            f"{_LARGEST >> 20} MB: a network with fewer intermediate values a row would fit"
        )


@dataclass(frozen=True)
class TimedStep:
    """What a step of a timed library computes: its main operator, and the line of the model."""

    operator: str
    line: str


def build_timed(program: Path, target: Target, out: Path) -> list[TimedStep]:
    """Write the files of `build` for a program.pt2. This library also counts the ticks of each step
    in its array `soa_lanes_ticks`. Returns the steps in their order."""
    plan = make_plan(make_row_program(program))
    _build_plan(plan, target, out, timed=True)
    return [_describe_step(step) for step in plan.steps]


def _describe_step(step: Step) -> TimedStep:
    """Describe a step by one of its operators: for a kernel by its product or reduction, if it has
    one."""
    if not isinstance(step, Kernel):
        tensor: Tensor = step
    else:
        tensor = step.source if step.inner is None else step.inner
    return TimedStep(name_of(tensor.operator), tensor.line)


def _compile(source: Source, target: Target, out: Path, parts: int) -> None:
    """Compile a source to network.so, and write its text to network.cpp. A long text is compiled in
    `parts` parts at the same time (0: as a whole)."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "network.cpp"
        file.write_text(source.text)
        (file.parent / "weights.bin").write_bytes(source.weights)
        is_short = len(source.text) <= _SHORT
        compile_library(file, HEADERS, target, out / "network.so", 0 if is_short else parts)
    (out / "network.cpp").write_text(source.text)


def choose_widths(plan: Plan, target: Target) -> list[Width]:
    """Choose the widths of row blocks for a CPU target, largest first.

    They are several vectors, if what each step reads fits into the L1 cache; one vector; four
    lanes, for up to four rows; and one row, in which a vector holds elements of the same row.
    Raises NotApplicableError for an unknown architecture.
    """
    if target.arch not in _VECTORS:
        raise NotApplicableError(f"lanes builds for {', '.join(_VECTORS)}; found {target}")
    lanes, registers = _VECTORS[target.arch]
    vectors = vectors_in_l1(plan, lanes)
    widths = [Width("many", lanes, vectors, registers)] if vectors > 1 else []
    widths.append(Width("one", lanes, vectors=1, registers=registers))
    if lanes > 4:
        widths.append(Width("four", lanes=4, vectors=1, registers=registers, few=lanes))
        widths.append(Width("single", lanes=1, vectors=1, registers=registers, few=lanes))
    return widths
