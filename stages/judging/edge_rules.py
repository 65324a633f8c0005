"""How an artifact's answers to stress rows and to special or extreme values are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from engines.errors import first_line, is_full_disk
from runtime.checked import Tolerance, run_poisoned
from runtime.session import Session
from soa.signature import Signature
from stages.judging.sensitivity import Answers, compare_in_float64, elements_by_row, row_maxima
from stages.reference import Edge

Special = Literal["report", "refuse"]
"""What to do if only one of artifact and eager model answers NaN or an infinity, at inputs that are
NaN, infinite or -0.0."""

_POISON = 0xFF
_ROUNDING = 1e-12  # the rounding error of a fraction


@dataclass(frozen=True)
class EdgeVerdict:
    """The verdict on an artifact's answers to the rows of an edge.

    `refusal` says why the artifact is refused for them; it is empty if it is not. `differs` tells
    whether its answers differ from the eager model's by more than the tolerance.
    """

    refusal: str = ""
    differs: bool = False


def judge_edge(
    session: Session,
    edge: Edge,
    tolerances: Mapping[str, Tolerance],
    program: Path | None = None,
    special_values: Special = "report",
) -> EdgeVerdict:
    """Judge an artifact's answers to the rows of an edge, by the kind of the edge.

    stress: as the reference's own rows. But if the captured `program` is given, a row in which the
    model's own rounding errors explain the difference is no reason to refuse.

    integers: a difference is a reason to refuse, unless NaN or infinity is on one side.

    special (NaN, infinities and -0.0): a wrong integer or bool, or a wrong finite number, is a
    wrong decision of the network, and refused. A NaN or an infinity on one side only is refused if
    `special_values` is "refuse". If it is "report", integers and bools in such a row are not
    judged, since they may follow from that number, as a class follows from probabilities.

    extreme (huge and denormal numbers): a difference is only reported, since it comes from an
    overflow in another step than eager's.
    """
    try:
        run = run_poisoned(session, edge.inputs, edge.case, _POISON, _POISON, guard="back")
    except Exception as error:
        if is_full_disk(error):
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
    """The tolerance, with `atol` raised to `rtol` times the largest finite answer: sums of large
    numbers in another order differ by a fraction of the largest one."""
    if not expected.is_floating_point() or not expected.numel():
        return allowed
    largest = expected.double().nan_to_num(0.0, 0.0, 0.0).abs().max()
    return replace(allowed, atol=max(allowed.atol, allowed.rtol * float(largest)))


def _fraction_true(elements: torch.Tensor) -> float:
    """The fraction of the bools in `elements` that are true; 0 if it is empty."""
    return float(elements.double().mean()) if elements.numel() else 0.0


def _wrong_elements(edge: Edge, answers: Answers, special: Special) -> torch.Tensor:
    """Mark the elements that are a reason to refuse an artifact: none at extreme values, all that
    are outside the tolerance in stress rows. In other rows, those of them that are finite on both
    sides; but all of them at special values if `special` is "refuse"."""
    if edge.kind == "extreme":
        return torch.zeros_like(answers.outside)
    if edge.kind == "stress" or (edge.kind == "special" and special == "refuse"):
        return answers.outside
    return answers.outside & answers.finite


def _without_consequences(
    signature: Signature, answers: Mapping[str, Answers], bad: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Unmark the integers and bools in rows in which a float is NaN or infinite on one side only.

    `bad` marks, by output, the elements that are a reason to refuse. An output that has one value
    for all rows is left as it is, and does not count as a float of any row.
    """
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
    """What a user can do about a refusal, to be added to its sentence; empty if there is
    nothing."""
    if edge.kind != "integers":
        return ""
    return (
        ". If the data has no such integers, give its range (reference: ranges: {column: [low, "
        "high]})"
    )
