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
_SHORT = 40_000  # characters: such a text, or a shorter one, is compiled faster as a whole
_LARGEST = 256 << 20  # the most bytes that a thread may need for intermediate values


def build(program: Path, target: Target, out: Path) -> list[str]:
    """See `Engine.compile`. Writes network.so, network.cpp and target.txt."""
    return build_row(make_row_program(program), target, out)


def build_row(program: Program, target: Target, out: Path) -> list[str]:
    """As `build`, from the program for one row."""
    plan = make_plan(program)
    widths = choose_widths(plan, target)
    _require_room(plan, widths)
    _compile(write_source(plan, widths), target, out, 1 + len(widths))
    (out / "target.txt").write_text(f"soa-target 1\n{target}\n")
    return ["network.so", "network.cpp", "target.txt"]


def _require_room(plan: Plan, widths: Sequence[Width]) -> None:
    """NotApplicableError if a thread would need too much memory for intermediate values."""
    needed = plan.size * 4 * max(width.lanes * width.vectors for width in widths)
    if needed > _LARGEST:
        raise NotApplicableError(
            f"its intermediate values take {needed >> 20} MB a thread, more than "
            f"{_LARGEST >> 20} MB: a network with fewer intermediate values a row would fit"
        )


@dataclass(frozen=True)
class TimedStep:
    """What a step of a timed library computes: the operators, and the line of the model."""

    operator: str
    line: str


def build_timed(program: Path, target: Target, out: Path) -> list[TimedStep]:
    """Write network.so and network.cpp of a program.pt2 as `build` does, but the library counts the
    ticks of each step in its array `soa_lanes_ticks`. Returns the steps in their order."""
    plan = make_plan(make_row_program(program))
    widths = choose_widths(plan, target)
    _require_room(plan, widths)
    _compile(write_source(plan, widths, timed=True), target, out, 0)
    (out / "target.txt").write_text(f"soa-target 1\n{target}\n")
    return [_timed_step(step) for step in plan.steps]


def _timed_step(step: Step) -> TimedStep:
    """The operator that a step computes: of a kernel, its product or reduction if it has one."""
    if not isinstance(step, Kernel):
        tensor: Tensor = step
    else:
        tensor = step.source if step.inner is None else step.inner
    return TimedStep(name_of(tensor.operator), tensor.line)


def _compile(source: Source, target: Target, out: Path, parts: int) -> None:
    """Compile a source file to network.so, in so many parts if it is long. Writes network.cpp."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "network.cpp"
        file.write_text(source.text)
        (file.parent / "weights.bin").write_bytes(source.weights)
        is_short = len(source.text) <= _SHORT
        compile_library(file, HEADERS, target, out / "network.so", 0 if is_short else parts)
    (out / "network.cpp").write_text(source.text)


def choose_widths(plan: Plan, target: Target) -> list[Width]:
    """The widths of row blocks, largest first: several vectors, if what each step reads fits into
    L1; one vector; four lanes, for up to four rows; and one row, whose elements fill vectors."""
    if target.arch not in _VECTORS:
        raise NotApplicableError(f"lanes builds for {', '.join(_VECTORS)}; found {target}")
    lanes, registers = _VECTORS[target.arch]
    vectors = vectors_in_l1(plan, lanes)
    widths = [Width("many", lanes, vectors, registers)] if vectors > 1 else []
    widths.append(Width("one", lanes, 1, registers))
    if lanes > 4:
        widths.append(Width("four", 4, 1, registers, few=lanes))
        widths.append(Width("single", 1, 1, registers, few=lanes))
    return widths
