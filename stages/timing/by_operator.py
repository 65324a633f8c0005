"""How much of a call of `lanes` each line of the model takes: from counters around its steps."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engines.lanes import TimedStep, build_timed
from engines.target import host_targets
from runtime.opening import open_candidate
from runtime.session import Session
from soa.signature import Signature
from stages.reference import Arrays, Case, label
from stages.timing.racing import bound_call, warm_seconds

_AT_LEAST_S = 0.2  # the time of the calls that are counted, for each size


@dataclass(frozen=True)
class OperatorTime:
    """The operator of a step, with the line of the model, and its shares of a call, 0 to 1, by
    size. An operator that follows a product or a sum is computed with it."""

    operator: str
    line: str
    shares: dict[str, float]


def operator_times(
    program: Path, signature: Signature, inputs: Arrays, cases: Sequence[Case]
) -> list[OperatorTime]:
    """The shares of each step of a program.pt2 in one thread on this host, the largest first.
    Raises NotApplicableError if `lanes` has no code for the program."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        steps = build_timed(program, host_targets("cpu")[0], out)
        with Session(
            signature, open_candidate("lanes", out / "network.so", torch.device("cpu"))
        ) as session:
            library = ctypes.CDLL(str(out / "network.so"))  # the one that the session has open
            ticks = (ctypes.c_int64 * len(steps)).in_dll(library, "soa_lanes_ticks")
            shares = {label(case): _measure_shares(session, inputs, case, ticks) for case in cases}
    return _sum_by_line(steps, shares)


def _measure_shares(
    session: Session, inputs: Arrays, case: Case, ticks: ctypes.Array[ctypes.c_int64]
) -> list[float]:
    """The share of each step in the time of a call. `ticks`: the sums of the processor's ticks, to
    which each call adds."""
    call = bound_call(session, inputs, case)
    call_s = max(warm_seconds(call), 1e-7)
    before = list(ticks)
    for _ in range(max(3, int(_AT_LEAST_S / call_s))):
        call()
    spent = [after - start for after, start in zip(ticks, before, strict=True)]
    return [step / max(sum(spent), 1) for step in spent]


def _sum_by_line(steps: Sequence[TimedStep], shares: dict[str, list[float]]) -> list[OperatorTime]:
    """The sums over the steps of one operator and line, the largest first. `shares`: of each step,
    by size."""
    times: dict[TimedStep, OperatorTime] = {}
    for i, step in enumerate(steps):
        total = times.setdefault(
            step, OperatorTime(step.operator, step.line, dict.fromkeys(shares, 0.0))
        )
        for size, of_steps in shares.items():
            total.shares[size] += of_steps[i]
    return sorted(times.values(), key=lambda total: -max(total.shares.values()))
