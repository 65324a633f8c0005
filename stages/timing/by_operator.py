"""Measures how much of a call each line of the model takes, in code of `lanes` that counts time."""

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
from stages.timing.racing import bind_call, time_warm_s

_AT_LEAST_S = 0.2  # the time of the calls that are counted, for each size


@dataclass(frozen=True)
class OperatorTime:
    """How much of a call an operator in a line of the model takes.

    `shares` has a fraction, 0 to 1, for each number of rows. An operator that `lanes` computes
    together with the product or sum before it is counted there.
    """

    operator: str
    line: str
    shares: dict[str, float]


def time_operators(
    program: Path, signature: Signature, inputs: Arrays, cases: Sequence[Case]
) -> list[OperatorTime]:
    """Measure which share of a call each operator of a program takes, in one thread on this host.

    `program` is the captured program.pt2; it is compiled with counters around its steps. The
    largest share is the first. Raises NotApplicableError if `lanes` has no code for the program.
    """
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
    """Time some calls and return the share of each step in them. The compiled code counts in
    `ticks` the processor's ticks that each step took, summed over all calls."""
    call = bind_call(session, inputs, case)
    call_s = max(time_warm_s(call), 1e-7)
    before = list(ticks)
    for _ in range(max(3, int(_AT_LEAST_S / call_s))):
        call()
    spent = [after - start for after, start in zip(ticks, before, strict=True)]
    return [step / max(sum(spent), 1) for step in spent]


def _sum_by_line(steps: Sequence[TimedStep], shares: dict[str, list[float]]) -> list[OperatorTime]:
    """Add up the shares of the steps that have the same operator and line, the largest first.
    `shares` has the share of each step, by size."""
    times: dict[TimedStep, OperatorTime] = {}
    for i, step in enumerate(steps):
        total = times.setdefault(
            step, OperatorTime(step.operator, step.line, dict.fromkeys(shares, 0.0))
        )
        for size, of_steps in shares.items():
            total.shares[size] += of_steps[i]
    return sorted(times.values(), key=lambda total: -max(total.shares.values()))
