"""Validate: compare an artifact with the reference, through the runtime, from SoA memory.

Each case runs the artifact as production does: bound to collections, outputs written in place.
Memory is poisoned beforehand: padding and outputs hold patterns that differ between runs. This
shows an element that is never written, a byte written outside the rows in use, an input that
changes, and an answer that depends on padding. On a CPU the memory also lies between pages without
access: an artifact that reads past an end is killed, in the child process that validates it. Last,
the artifact runs on windows of larger collections that begin at odd rows. If that goes wrong, the
artifact is refused if a layout aligns its columns to their elements only (`row_step` 1); otherwise
only such windows are refused.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from engines.errors import first_line, is_full_disk, is_out_of_memory
from engines.processes import run_isolated
from runtime.checked import (
    Deviation,
    PoisonedRun,
    Tolerance,
    combine,
    compare,
    run_poisoned,
    same_answers,
)
from runtime.opening import digest_answers, open_candidate
from runtime.process import keep_freed_memory
from runtime.session import Session
from soa.signature import Signature
from soa.text import number
from stages.capture import SEE_EACH_OTHER, rows_are_independent
from stages.compile import TO_READ_PROGRAMS
from stages.errors import ReferenceDataError
from stages.judging.edge_rules import Special, judge_edge
from stages.judging.many_rows import compare_on_many_rows
from stages.model import Precision, tf32_switches
from stages.reference import (
    Arrays,
    Case,
    Nonfinite,
    Reference,
    count_nonfinite,
    inputs_at,
    label,
    read_set,
    run_session,
    windows,
)
from stages.reports import NO_MEMORY, CaseReport, ValidationReport
from stages.timing import tiled

# Byte patterns to poison with. All ones is NaN in every floating type, and -1 or the largest value
# in every integer type. The other pattern is an ordinary number in most types.
_NAN, _ORDINARY = 0xFF, 0x5A
_SPARE_ROWS = 100
_ELSEWHERE = "candidate-elsewhere"
_HERE = "stages.judging.validate:validate_here"


@dataclass(frozen=True)
class Trial:
    """An artifact, and all that is needed to validate it: the references that it is compared with,
    and how its answers are judged."""

    engine: str
    file: Path
    signature: Signature
    reference: Path
    tolerances: Mapping[str, Tolerance]
    classifiers: frozenset[str] = frozenset()
    """The outputs whose classes are compared too."""
    precision: Precision = "fp32"
    tile: int = 0
    """The artifact runs on this number of rows at a time; 0: on all rows at once."""
    program: Path | None = None
    """The captured program, to judge stress rows in which the model itself is not sure."""
    special_values: Special = "report"
    more: Path | None = None
    """A reference of further rows, with a case for each window."""
    many: Path | None = None
    """A reference of many rows like those of `reference`."""
    set_nonfinite: float | None = None
    """If given, `reference` is a larger set of inputs in the form of `read_set`, and the expected
    answers are those of `program`, run by the `exported` engine: this shows that the compiled code
    agrees with the captured program. At most this fraction of an output may be NaN or infinite."""

    def to_dict(self) -> dict[str, Any]:
        """The trial as JSON data, to pass it to another process."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        # Links are not resolved: a held file (`Pinned`) is opened through its link.
        files = {
            name: str(path.absolute()) for name, path in data.items() if isinstance(path, Path)
        }
        return {
            **data,
            **files,
            "signature": self.signature.to_dict(),
            "tolerances": {output: asdict(own) for output, own in self.tolerances.items()},
            "classifiers": sorted(self.classifiers),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """The trial that `to_dict` turned into data."""
        names = ("file", "reference", "program", "more", "many")
        files = {name: Path(data[name]) for name in names if data.get(name) is not None}
        parsed = {
            "signature": Signature.from_dict(data["signature"]),
            "tolerances": {output: Tolerance(**own) for output, own in data["tolerances"].items()},
            "classifiers": frozenset(data["classifiers"]),
        }
        return cls(**{**data, **files, **parsed})


def validate_candidate(
    trial: Trial, folder: Path, timeout_s: float, device: str = "cpu"
) -> ValidationReport:
    """Open and validate an artifact in a child process, so that a crash there fails only this
    candidate.

    With a tile, the artifact is refused if a row's answer depends on other rows. If memory runs
    out, validation runs once more without keeping freed memory for reuse. `folder` is for scratch
    files. Raises ReferenceDataError if a larger set of inputs does not fit the signature.
    """
    # Not this module: it loads the native runner, which then refuses threads in the child.
    imports: tuple[str, ...] = ("stages.compile",)
    if trial.engine == "exported" or trial.set_nonfinite is not None:
        imports += TO_READ_PROGRAMS
    if trial.set_nonfinite is not None:
        read_set(trial.signature, trial.reference)
    payload: dict[str, Any] = {"trial": trial.to_dict(), "device": device}
    begun = time.monotonic()
    outcome = run_isolated(_HERE, payload, folder, timeout_s, imports)
    left_s = timeout_s - (time.monotonic() - begun)
    if outcome.killed and left_s > 0:
        payload["keep_memory"] = False
        outcome = run_isolated(_HERE, payload, folder, left_s, imports)
    if not outcome.ok:
        why = str(outcome.error)
        if why in ("killed by SIGSEGV", "killed by SIGBUS"):
            why = f"{why} {_describe_last_case(outcome.log)}"
        return ValidationReport.failed(trial.engine, why, outcome.trace, outcome.code)
    return ValidationReport.from_dict(outcome.value)


def _describe_last_case(log: Path) -> str:
    """A phrase that says at which case the child process was killed. It is read from the log, into
    which the child writes a line `at n=33` before each case."""
    lines = log.read_text(errors="replace").splitlines()  # trusted
    cases = [line for line in lines if line.startswith("at ")]
    if not cases:
        return "before its first run"
    return f"{cases[-1]}: it may have reached beyond the memory that it was given"


def validate_here(
    trial: Mapping[str, Any], device: str = "cpu", keep_memory: bool = True
) -> dict[str, Any]:
    """Validate in the child process. `trial` and the report that is returned are JSON data.

    `keep_memory` keeps freed memory for reuse, which is faster. If memory runs out with it,
    MemoryError is raised, and the parent process tries again without it.
    """
    if keep_memory:
        keep_freed_memory()
    torch.set_num_threads(1)
    parsed, torch_device = Trial.from_dict(trial), torch.device(device)
    with tf32_switches(parsed.precision):
        executable = open_candidate(parsed.engine, parsed.file, torch_device)
        session = Session(parsed.signature, executable, torch_device)
        if parsed.set_nonfinite is None:
            report = _validate_with_reference(session, parsed)
        else:
            report = _validate_with_program(session, parsed)
    if is_out_of_memory(RuntimeError(report.reason or report.window)):
        if keep_memory:
            raise MemoryError(report.reason)
        report = replace(report, code=NO_MEMORY)
    return report.to_dict()


def _validate_with_reference(session: Session, trial: Trial) -> ValidationReport:
    """Compare a session with all references of a trial. The many rows, which take the longest, come
    last, and only if all else is valid."""
    reference = Reference.load(trial.reference, trial.signature)
    if trial.tile and not rows_are_independent(session, reference.inputs, trial.tolerances):
        return ValidationReport.refused(trial.engine, SEE_EACH_OTHER, "candidate-rows")
    session = tiled(session, trial.tile)
    report = validate_session(
        session,
        trial.engine,
        reference=reference,
        tolerances=trial.tolerances,
        classifiers=trial.classifiers,
        say=lambda text: print(text, flush=True),  # trusted
        more=None if trial.more is None else Reference.load(trial.more),
        program=trial.program,
        special_values=trial.special_values,
    )
    if report.valid:
        report = replace(report, bits=digest_answers(session, trial.reference))
    if report.valid and trial.many is not None and trial.program is not None:
        print("at many rows", flush=True)  # trusted
        pieces = Reference.load(trial.many).edges
        tried = compare_on_many_rows(session, pieces, trial.tolerances, trial.program)
        report = replace(report, many_rows=tried.record)
        if tried.refusal:
            why = f"{tried.record.text}; {tried.refusal}, which rounding errors do not explain"
            return replace(report, valid=False, reason=why, code="candidate-deviates")
    return report


def validate_session(
    session: Session,
    name: str,
    reference: Reference,
    tolerances: Mapping[str, Tolerance],
    classifiers: frozenset[str] = frozenset(),
    say: Callable[[str], None] = lambda text: None,
    more: Reference | None = None,
    program: Path | None = None,
    special_values: Special = "report",
) -> ValidationReport:
    """Run every case of the reference, its edges, and the windows of `more`, in this process.

    `name` is the engine's name in the report. `classifiers` are the outputs whose classes are
    compared too. `say` gets a line before each case. If the captured `program` is given, an
    artifact is not refused for stress rows that are ill-conditioned: rows in which changes as small
    as a rounding move the model's own answers as far.
    """
    begun = time.monotonic()
    cases: list[CaseReport] = []
    for case, outputs in zip(reference.cases, reference.outputs, strict=True):
        say(f"at {label(case)}")
        cases.append(
            _validate_case(session, reference.inputs, case, outputs, tolerances, classifiers)
        )
    if more is not None:
        pieces = windows(session.signature, more.inputs)
        for (rows, case), outputs in zip(pieces, more.outputs, strict=True):
            say(f"at {label(case)} of the further rows")
            cases.append(_validate_case(session, rows, case, outputs, tolerances, classifiers))
    report = _make_report(name, cases, tolerances, begun)
    if not report.valid:
        return report
    differing: list[str] = []
    for edge in reference.edges:
        say(f"at {label(edge.case)} of {edge.what}")
        judged = judge_edge(session, edge, tolerances, program, special_values)
        if judged.refusal:
            why = f"{edge.what} in the inputs: {judged.refusal}"
            seconds = time.monotonic() - begun
            return replace(report, valid=False, reason=why, seconds=seconds, code="candidate-edge")
        if judged.differs:
            differing.append(edge.what)
    return replace(report, edges=tuple(differing), seconds=time.monotonic() - begun)


def _validate_with_program(session: Session, trial: Trial) -> ValidationReport:
    """Compare a session with the captured program, on a larger set of inputs, window by window.

    The report is a failure if too many of the program's own answers are NaN or infinite, so that
    they prove nothing.
    """
    assert trial.program is not None and trial.set_nonfinite is not None
    inputs = read_set(trial.signature, trial.reference)
    session = tiled(session, trial.tile)
    begun = time.monotonic()
    signature = session.signature
    portable = Session(signature, open_candidate("exported", trial.program, torch.device("cpu")))
    cases: list[CaseReport] = []
    counts: list[Nonfinite] = []
    for rows, case in windows(signature, inputs):
        print(f"at {label(case)} of the set", flush=True)  # trusted
        answers = run_session(portable, rows, case)
        cases.append(_validate_case(session, rows, case, answers, trial.tolerances, frozenset()))
        counts += count_nonfinite(signature, (case,), (answers,))
    why = _why_unproven(counts, trial.set_nonfinite)
    if why:
        return ValidationReport.failed(trial.engine, why, code=ReferenceDataError.code)
    return _make_report(trial.engine, cases, trial.tolerances, begun)


def _why_unproven(counts: Sequence[Nonfinite], limit: float) -> str:
    """A sentence about the first output of the portable program of which more than the fraction
    `limit` is NaN or infinite; empty if there is none. `counts` has each output in each window."""
    values, nonfinite = Counter[str](), Counter[str]()
    for window in counts:
        values[window.output] += window.values
        nonfinite[window.output] += window.count
    for output, total in values.items():
        share = nonfinite[output] / max(1, total)
        if share > limit:
            return (
                f"output {output!r}: {share:.2%} of the portable program's answers are NaN or "
                f"infinite and prove nothing; at most {limit:.2%} is allowed"
            )
    return ""


def _make_report(
    name: str, cases: Sequence[CaseReport], tolerances: Mapping[str, Tolerance], begun: float
) -> ValidationReport:
    """The report on the artifact of the engine `name`, from the reports on its cases. Validation
    began at `begun`, by the monotonic clock."""
    deviations = {
        output: [case.outputs[output] for case in cases if output in case.outputs]
        for output in tolerances
    }
    refusal = _find_refusal(cases, tolerances)
    return ValidationReport(
        name,
        refusal is None,
        reason=None if refusal is None else refusal.reason,
        cases=tuple(cases),
        worst={output: combine(by_case) for output, by_case in deviations.items() if by_case},
        seconds=time.monotonic() - begun,
        window=next((case.window for case in cases if case.window), ""),
        code="" if refusal is None else refusal.code,
    )


@dataclass(frozen=True)
class _Refusal:
    """Why an artifact is refused, and the code of the reason (docs/reference/refusals.md)."""

    reason: str
    code: str


def _find_refusal(
    cases: Sequence[CaseReport], tolerances: Mapping[str, Tolerance]
) -> _Refusal | None:
    """The reason to refuse the artifact: the first fault of any case, else the output with the
    largest share of elements outside the tolerance. None if there is no reason."""
    for case in cases:
        if case.faults:
            return _Refusal(f"at {label(case.rows)}: {case.faults[0]}", case.code)
    worst: _Refusal | None = None
    worst_share = 0.0
    for case in cases:
        for output, deviation in case.outputs.items():
            if deviation.outside > max(tolerances[output].max_outside, worst_share):
                where = f"output {output!r} at {label(case.rows)}"
                reason = _describe_deviation(where, deviation, tolerances[output])
                worst, worst_share = _Refusal(reason, "candidate-deviates"), deviation.outside
    return worst


def _describe_deviation(where: str, deviation: Deviation, allowed: Tolerance) -> str:
    """A sentence about an output that deviates too much. `where` names the output and the case."""
    how = f"max abs deviation {number(deviation.max_abs)}"
    if deviation.nonfinite_mismatches:
        how = f"{deviation.nonfinite_mismatches} NaN or Inf where the reference has none"
    return (
        f"{where}, row {deviation.worst_row}: {how}, {deviation.outside:.2%} of its elements "
        f"outside atol {allowed.atol:g} + rtol {allowed.rtol:g} "
        f"(allowed: {allowed.max_outside:.2%})"
    )


def _validate_case(
    session: Session,
    inputs: Arrays,
    case: Case,
    expected: Mapping[str, torch.Tensor],
    tolerances: Mapping[str, Tolerance],
    classifiers: frozenset[str],
) -> CaseReport:
    """Run a case on poisoned memory in several ways, and compare the answers with `expected`.

    All runs must give the same bits, except the one in memory with spare rows, whose columns have
    other strides. Windows that begin at an odd row are tried last, and only if nothing else failed.
    """
    signature = session.signature
    inputs = inputs_at(signature, inputs, case)
    try:
        first = run_poisoned(session, inputs, case, _NAN, _NAN, guard="back")
        again = run_poisoned(session, inputs, case, _NAN, _NAN)
        other = run_poisoned(session, inputs, case, _ORDINARY, _ORDINARY, guard="front")
        roomy = run_poisoned(session, inputs, case, _ORDINARY, _NAN, spare=_SPARE_ROWS)
    except Exception as error:
        return _report_error(case, error)
    faults = [_Refusal(fault, _ELSEWHERE) for fault in (*first.faults, *roomy.faults)]
    if not same_answers(first, again):
        why = "two runs on the same memory give different answers"
        faults.append(_Refusal(why, "candidate-unsteady"))
    elif not same_answers(first, other):
        faults.append(_why_poison_shows(session, inputs, case, first))

    def deviations_of(run: PoisonedRun) -> dict[str, Deviation]:
        return {
            bound.name: compare(
                run.outputs[bound.name],
                expected[bound.name].reshape(bound.shape(case[bound.rows])),
                tolerances[bound.name],
                bound.name in classifiers,
            )
            for bound in signature.outputs
        }

    tight, spare = deviations_of(first), deviations_of(roomy)
    deviations = {
        name: max(tight[name], spare[name], key=lambda own: (own.outside, own.max_abs))
        for name in tight
    }
    if faults:  # an artifact that writes elsewhere must not run on windows
        reasons = tuple(dict.fromkeys(fault.reason for fault in faults))
        return CaseReport(case, deviations, reasons, code=faults[0].code)
    refusal = _find_refusal([_run_on_windows(session, inputs, case, deviations_of)], tolerances)
    if refusal is None:
        return CaseReport(case, deviations, (), "")
    if not any(layout.row_step == 1 for layout in signature.layouts.values()):
        return CaseReport(case, deviations, (), refusal.reason)
    reasons = (f"from an odd row of larger collections on: {refusal.reason}",)
    return CaseReport(case, deviations, reasons, refusal.reason, refusal.code)


def _run_on_windows(
    session: Session,
    inputs: Arrays,
    case: Case,
    deviations_of: Callable[[PoisonedRun], dict[str, Deviation]],
) -> CaseReport:
    """Run a case on windows of larger collections that begin at an odd row, and report on it.
    `deviations_of` returns the deviations of a run, by output."""
    try:
        free = Session(session.signature, session.executable, session.device, any_start=True)
        moved = run_poisoned(free, inputs, case, _ORDINARY, _NAN, moved=True)
        return CaseReport(case, deviations_of(moved), tuple(moved.faults), code=_ELSEWHERE)
    except Exception as error:
        return _report_error(case, error)


def _report_error(case: Case, error: Exception) -> CaseReport:
    """The report of a case in which the artifact raised `error`. The error is raised again if it is
    that of a full disk, which says nothing about the artifact."""
    if is_full_disk(error):
        raise error
    reason = f"the artifact failed: {type(error).__name__}: {first_line(error)}"
    code = NO_MEMORY if is_out_of_memory(error) else "candidate-failed"
    return CaseReport(case, {}, (reason,), code=code)


def _why_poison_shows(session: Session, inputs: Arrays, case: Case, first: PoisonedRun) -> _Refusal:
    """Find out which poison changes the answers: that in the padding of the inputs, or that in the
    outputs, which shows if an element is never written.

    The run `first` had the same pattern in both places. Here only the padding gets another one.
    """
    padded = run_poisoned(session, inputs, case, pad=_ORDINARY, poison=_NAN)
    if not same_answers(first, padded):
        why = "the answers depend on what lies in the padding of the inputs"
        return _Refusal(why, "candidate-padding")
    return _Refusal("some output elements are never written", "candidate-unwritten")
