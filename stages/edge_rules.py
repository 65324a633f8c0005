"""How an artifact's answers to stress rows and to special or extreme values are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from engines.errors import first_line
from runtime.checked import Tolerance, compare, poisoned_run
from runtime.session import Session
from soa.text import number
from stages.reference import Edge
from stages.sensitivity import Sensitivity, distance, explained, rows

Special = Literal["report", "refuse"]
"""What a NaN or an infinity that differs from the model's means for an artifact, at inputs that are
NaN, infinite or -0.0."""

_POISON = 0xFF
_ROUNDING = 1e-12  # the rounding error of a fraction


def at_edge(
    session: Session,
    edge: Edge,
    tolerances: Mapping[str, Tolerance],
    program: Path | None = None,
    special_values: Special = "report",
) -> tuple[str, bool]:
    """Why an artifact is refused for these rows, or ""; and whether its answers differ from eager.

    Stress rows are judged as the reference's own. At NaN, infinities and -0.0 an integer, a bool,
    or another finite number for a finite one is a wrong decision of the network, and refused. A NaN
    or an infinity on one side only, and an overflow in another step than eager's, are reported.
    """
    try:
        run = poisoned_run(session, edge.inputs, edge.case, _POISON, _POISON, guard="back")
    except Exception as error:
        return f"the artifact failed: {type(error).__name__}: {first_line(error)}", False
    if run.faults:
        return run.faults[0], False
    differs = False
    for name, expected in edge.outputs.items():
        found = run.outputs[name]
        wanted, allowed = expected.reshape(found.shape), tolerances[name]
        if edge.kind == "stress":
            apart = _outside(found, wanted, allowed)
            bad = _unexplained(session, edge, name, found, wanted, allowed, program)
            if float(bad.double().mean()) > allowed.max_outside:
                return _said(name, found, wanted, bad), True
            differs |= bool(apart.any())
            continue
        scaled = _scaled(found, wanted, allowed)
        deviation = compare(found, wanted, scaled, classifier=False)
        differs |= deviation.outside > allowed.max_outside
        bad = _wrong(edge, found, wanted, scaled, special_values)
        if float(bad.double().mean()) > max(allowed.max_outside, _ROUNDING):
            return _said(name, found, wanted, bad) + _advice(edge), True
    return "", differs


def _scaled(found: torch.Tensor, wanted: torch.Tensor, allowed: Tolerance) -> Tolerance:
    """For large numbers, sums in another order differ by a fraction of the largest one."""
    if not found.is_floating_point() or not wanted.numel():
        return allowed
    largest = wanted.double().nan_to_num(0.0, 0.0, 0.0).abs().max()
    return replace(allowed, atol=max(allowed.atol, allowed.rtol * float(largest)))


def _bands(wanted: torch.Tensor, allowed: Tolerance) -> torch.Tensor:
    """The tolerance of each element. Integers have none: half a unit divides equal from unequal."""
    size = wanted.double().nan_to_num(0.0, 0.0, 0.0).abs()
    return (allowed.atol + allowed.rtol * size).clamp_min(1e-300)


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    wanted = wanted.to(found.dtype)
    if found.is_floating_point():
        return distance(found, wanted)
    return (found != wanted).double()  # different large int64 may be the same float64


def _outside(found: torch.Tensor, wanted: torch.Tensor, allowed: Tolerance) -> torch.Tensor:
    return _apart(found, wanted) > _bands(wanted, allowed)


def _wrong(
    edge: Edge, found: torch.Tensor, wanted: torch.Tensor, allowed: Tolerance, special: Special
) -> torch.Tensor:
    """The elements for which an artifact is refused, at integers, special or extreme values."""
    outside = _outside(found, wanted, allowed)
    finite = found.isfinite() & wanted.to(found.dtype).isfinite()
    if edge.kind == "extreme" or (edge.kind == "special" and special == "refuse"):
        return outside & (edge.kind == "special")
    return outside & finite


def _unexplained(
    session: Session,
    edge: Edge,
    name: str,
    found: torch.Tensor,
    wanted: torch.Tensor,
    allowed: Tolerance,
    program: Path | None,
) -> torch.Tensor:
    """The elements outside the tolerance that the model's own uncertainty does not explain."""
    outside = _outside(found, wanted, allowed)
    if program is None or not outside.any():
        return outside
    band = _bands(wanted, allowed)
    try:
        model = Sensitivity(session.signature, program)
        exact = model.exact(edge.inputs, edge.case)
        moves = model.moves(edge.inputs, edge.case, exact, {name: band})[name]
    except Exception:  # a program that does not run in float64 excuses nothing
        return outside
    deviation = rows(_apart(found, wanted) / band).amax(1)
    bad = ~explained(deviation, moves)
    return outside & bad.reshape(-1, *[1] * (found.ndim - 1)) if found.ndim else outside & bad


def _said(name: str, found: torch.Tensor, wanted: torch.Tensor, bad: torch.Tensor) -> str:
    first = int(rows(bad).any(1).double().argmax())
    at = int(rows(bad)[first].double().argmax())
    mine = number(float(rows(found)[first, at]))
    eager = number(float(rows(wanted)[first, at]))
    return f"output {name!r} differs from eager, row {first}: {mine}, eager has {eager}"


def _advice(edge: Edge) -> str:
    if edge.kind != "integers":
        return ""
    return (
        ". If the data has no such integers, give its range (reference: ranges: {column: [low, "
        "high]})"
    )
