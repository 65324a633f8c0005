"""How far a network is from the machine's limits: `python -m benchmarks.speed.limit [CONFIG ...]`.

A run must compute at least the multiplications and additions of its compiled program, and move at
least its inputs, outputs and weights. The speed of one core of this host is measured for both: with
a large product of float32 matrices, and with a copy of memory. The least time of a run is the
larger of the two; the table gives the measured time as a multiple of it. Elementwise functions are
not counted, so for a network that spends its time in them the multiple shows their cost.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed.zoo import asked, chosen_target, new_registry, sizes
from benchmarks.table import SPREAD, Cell, Panel, print_machine, print_panels
from engines.aoti.engine import AotiEngine
from engines.base import engine
from engines.errors import EngineError
from engines.exported import load_program, quiet_torch
from pipeline.building.run_config import run
from registry.bundle.bundle import Bundle
from runtime.loader import measured_session
from runtime.opening import Opening, open_version
from soa.dtypes import itemsize
from soa.errors import SoaPipelineError
from soa.memory import argument_tensors
from stages.reference.answers import Arrays, Reference, filled_collections
from stages.reference.nonfinite import Case
from stages.timing import bound_call, race

_SECONDS = 1.0
_GEMM = 2048
_COPY = 1 << 27  # bytes, more than any cache has
CAPTION = (
    "x: the chosen artifact's time as a multiple of the least that a core of this host needs for\n"
    f"it: its products at a large GEMM's speed, or its memory moved once. {SPREAD}."
)


def peaks() -> tuple[float, float]:
    """The speed of one core: floating-point operations and moved bytes per microsecond."""
    a = torch.randn(_GEMM, _GEMM)
    given, written = torch.ones(_COPY // 4), torch.empty(_COPY // 4)
    out = torch.empty_like(a)
    times = race({"gemm": lambda: torch.mm(a, a, out=out), "copy": lambda: written.copy_(given)}, 3)
    return 2 * _GEMM**3 / times["gemm"].p05_us, 2 * _COPY / times["copy"].p05_us


def work_of(bundle: Bundle, engine_name: str, inputs: Arrays, case: Case) -> tuple[int, int]:
    """The operations of the program as this engine compiles it, and the bytes that must move."""
    opened = open_version(Opening(bundle.path, mode="test"))
    program = load_program(bundle.file(bundle.manifest.program))
    made_by = engine(engine_name)
    if isinstance(made_by, AotiEngine):
        with contextlib.suppress(EngineError):
            made_by.build().rewritten(program)
    given, written = filled_collections(opened.signature, inputs, case, torch.device("cpu"))
    arguments = argument_tensors(opened.signature, {**given, **written}, case)
    with quiet_torch(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        program.module()(*arguments)
    weights = sum(t.nbytes for t in program.state_dict.values())
    moved = sum(
        math.prod(bound.shape(case[bound.rows])) * itemsize(bound.plan.dtypes[0])
        for bound in (*opened.signature.inputs, *opened.signature.outputs)
    )
    return counter.get_total_flops(), moved + weights


def measure(bundle: Bundle, peak: tuple[float, float]) -> Panel:
    opened = open_version(Opening(bundle.path, mode="test"))
    target = chosen_target(opened)
    record = bundle.manifest.targets[target]
    inputs = Reference.load(bundle.file(bundle.manifest.reference)).inputs
    session = measured_session(opened, target)
    names = ("time of a call", "least for its products", "least for its memory")
    rows: dict[str, list[Cell | None]] = {name: [] for name in names}
    for case in sizes(opened.signature):
        label = ",".join(map(str, case.values())) if len(case) == 1 else ""
        flops, moved = work_of(bundle, record.engine_at(label), inputs, case)
        timing = race({"": bound_call(session, inputs, case)}, _SECONDS)[""]
        least = (flops / peak[0], moved / peak[1])
        multiple = timing.median_us / max(least)
        rows[names[0]].append(Cell(timing.median_us, timing.p05_us, timing.p95_us, multiple))
        rows[names[1]].append(Cell(least[0]) if flops else None)
        rows[names[2]].append(Cell(least[1]))
    columns = tuple(max(case.values()) for case in sizes(opened.signature))
    return Panel(
        f"{bundle.manifest.name} ({record.choice()}, {target})", "rows", "µs",
        columns, {name: tuple(cells) for name, cells in rows.items()},
    )  # fmt: skip


def main(configs: list[Path], work: Path) -> None:
    torch.set_num_threads(1)
    print_machine()
    peak = peaks()
    print(f"one core: {peak[0] / 1e3:.1f} GFLOP/s in a GEMM, {peak[1] / 1e3:.1f} GB/s in a copy")
    panels: list[Panel] = []
    with tempfile.TemporaryDirectory() as place:
        registry = new_registry(Path(place))
        for config in configs:
            try:
                panels.append(measure(run(config, registry, work / config.stem).bundle, peak))
            except SoaPipelineError as error:
                print(f"without {config.stem}: {error}", flush=True)
                continue
            print_panels(CAPTION if len(panels) == 1 else "", panels[-1:])


if __name__ == "__main__":
    with asked() as given:
        main(given.configs, given.work)
