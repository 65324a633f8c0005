"""How an artifact's answers to stress rows and to special or extreme values are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from engines.errors import first_line, full_disk
from runtime.checked import Tolerance, run_poisoned
from runtime.session import Session
from soa.signature import Signature
from stages.judging.sensitivity import Answers, compare_in_float64, elements_by_row, row_maxima
from stages.reference import Edge

Special = Literal["report", "refuse"]
"""What a NaN or an infinity on one side only means, at inputs that are NaN, infinite or -0.0."""

_POISON = 0xFF
_ROUNDING = 1e-12  # the rounding error of a fraction


@dataclass(frozen=True)
class EdgeVerdict:
    """`refusal`: why an artifact is refused for these rows; empty if it is not. `differs`: whether
    its answers differ from the eager model's."""

    refusal: str = ""
    differs: bool = False


def judge_edge(
    session: Session,
    edge: Edge,
    tolerances: Mapping[str, Tolerance],
    program: Path | None = None,
    special_values: Special = "report",
) -> EdgeVerdict:
    """Judge an artifact's answers to the rows of an edge.

    Stress rows are judged as the reference's own, but a row in which the model itself is not sure
    is no reason to refuse. At NaN, infinities and -0.0 an integer, a bool, or another finite number
    for a finite one is a wrong decision of the network, and refused. A NaN or an infinity on one
    side only is refused if `special_values` says so; if not, an integer or a bool of such a row is
    not judged, since it may follow from that number, as a class from probabilities. At huge and
    denormal numbers a difference is only reported: it is an overflow in another step than eager's.
    """
    try:
        run = run_poisoned(session, edge.inputs, edge.case, _POISON, _POISON, guard="back")
    except Exception as error:
        if full_disk(error):
            raise
        return EdgeVerdict(f"the artifact failed: {type(error).__name__}: {first_line(error)}")
    if run.faults:
        return EdgeVerdict(run.faults[0])
    answers: dict[str, Answers] = {}
    for name, expected in edge.outputs.items():
        plain = tolerances[name]
        allowed = plain if edge.kind == "stress" else _widen_for_large(expected, plain)
        answers[name] = Answers.of(run.outputs[name], expected, allowed)
    bad = {name: _wrong_elements(edge, answer, special_values) for name, answer in answers.items()}
    if edge.kind == "special" and special_values == "report":
        bad = _without_consequences(session.signature, answers, bad)
    any_bad = any(elements.any() for elements in bad.values())
    if edge.kind == "stress" and program is not None and any_bad:
        exact = compare_in_float64(session.signature, program, edge.inputs, edge.case, answers)
        bad = bad if exact is None else dict(exact.unexplained)
    verdict = EdgeVerdict()
    for name, answer in answers.items():
        most = max(tolerances[name].max_outside, _ROUNDING)
        if _fraction_true(bad[name]) > most:
            return EdgeVerdict(answer.describe_first(name, bad[name]) + _advice(edge), differs=True)
        if _fraction_true(answer.outside) > most:
            verdict = EdgeVerdict(differs=True)
    return verdict


def _widen_for_large(expected: torch.Tensor, allowed: Tolerance) -> Tolerance:
    """For large numbers, sums in another order differ by a fraction of the largest one."""
    if not expected.is_floating_point() or not expected.numel():
        return allowed
    largest = expected.double().nan_to_num(0.0, 0.0, 0.0).abs().max()
    return replace(allowed, atol=max(allowed.atol, allowed.rtol * float(largest)))


def _fraction_true(elements: torch.Tensor) -> float:
    """The fraction of bools that are true; 0 if there are none."""
    return float(elements.double().mean()) if elements.numel() else 0.0


def _wrong_elements(edge: Edge, answers: Answers, special: Special) -> torch.Tensor:
    """The elements that are a reason to refuse an artifact."""
    if edge.kind == "extreme":
        return torch.zeros_like(answers.outside)
    if edge.kind == "stress" or (edge.kind == "special" and special == "refuse"):
        return answers.outside
    return answers.outside & answers.finite


def _without_consequences(
    signature: Signature, answers: Mapping[str, Answers], bad: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`bad`, by output, without the integers and bools of rows in which a float is NaN or infinite
    on one side only. An output that has one value for all rows says nothing about a row."""
    unsure: dict[str, torch.Tensor] = {}  # the rows of each dimension, `(n,)`
    outputs_with_rows = [bound for bound in signature.outputs if not bound.rowless]
    for bound in outputs_with_rows:
        own = answers[bound.name]
        one_sided = row_maxima(own.outside & ~own.finite)
        unsure[bound.rows] = unsure.get(bound.rows, torch.zeros_like(one_sided)) | one_sided
    remaining = dict(bad)
    for bound in outputs_with_rows:
        if not answers[bound.name].artifact.is_floating_point():
            elements = elements_by_row(bad[bound.name]) & ~unsure[bound.rows][:, None]
            remaining[bound.name] = elements.reshape(bad[bound.name].shape)
    return remaining


def _advice(edge: Edge) -> str:
    """What a user can do about a refusal, as the end of its sentence; empty if nothing."""
    if edge.kind != "integers":
        return ""
    return (
        ". If the data has no such integers, give its range (reference: ranges: {column: [low, "
        "high]})"
    )
