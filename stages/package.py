"""Package: write what was built into one sealed folder, completely or not at all.

A bundle holds everything of one version; an annex holds one more target of a version.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from engines.base import Portable, engine
from registry import stamp
from registry.bundle import (
    ANNEX,
    BENCHMARK,
    CARD,
    CURVES,
    VALIDATION,
    Annex,
    AnnexRecord,
    Below,
    BenchmarkStats,
    Bundle,
    Evidence,
    LabelledData,
    Manifest,
    Provenance,
    SessionSettings,
    TargetRecord,
    Worst,
    prefix_of,
    seal,
    write_atomically,
)
from registry.bundle import Candidate as CandidateRecord
from registry.bundle import Capture as CaptureRecord
from registry.mlflow import fields, write_mlmodel
from runtime.checked import Tolerance
from runtime.watch import PROFILE
from soa.signature import Signature
from soa.signature_lines import describe
from stages.capture import Capture
from stages.compile import Compiled
from stages.errors import StageError
from stages.reference import Reference, inputs_at, profile_of_rows
from stages.reports import EAGER, BenchmarkReport, Curve, ValidationReport

EVIDENCE: tuple[Evidence, ...] = get_args(Evidence)
"""All kinds of evidence, the weakest first."""

NO_BASELINE = (
    "timed without the eager model, whose source is not in the bundle: the candidates are compared "
    "with each other only"
)


@dataclass(frozen=True)
class Candidate:
    """A compiled artifact and the verdict on it. `tile` is the number of rows that it runs at a
    time; 0: all rows at once."""

    compiled: Compiled
    report: ValidationReport
    tile: int = 0

    @property
    def engine(self) -> str:
        return self.compiled.engine


@dataclass(frozen=True)
class TargetResult:
    """The results for one target: its candidates by engine, and a benchmark of the valid ones."""

    target: str
    options: Mapping[str, Mapping[str, Any]]
    """Compile options by engine."""
    candidates: Mapping[str, Candidate]
    benchmark: BenchmarkReport | None
    raced_with: Sequence[str] = ()
    """Other targets that were timed in the same race."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the chosen candidate, by name."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """The curves to draw, by metric."""

    @property
    def chosen(self) -> str | None:
        """The name of the fastest valid candidate.

        If no candidate is valid, it is one that no device here could run but that passed the tests
        without it: the first with the best evidence. None if there is no such candidate either.
        """
        if self.benchmark and self.benchmark.fastest:
            return self.benchmark.fastest
        unverified = [
            name for name, candidate in self.candidates.items() if candidate.report.unverified
        ]
        return max(unverified, key=self._evidence_rank, default=None)

    @property
    def status(self) -> Literal["verified", "failed"] | Evidence:
        """`verified` if the chosen artifact is valid. If it is unverified: the evidence for it.
        `failed` if no artifact is chosen."""
        if self.chosen is None:
            return "failed"
        report = self.candidates[self.chosen].report
        return report.evidence if report.unverified else "verified"

    def _evidence_rank(self, name: str) -> int:
        """The place of a candidate's evidence in `EVIDENCE`: the larger, the better."""
        return EVIDENCE.index(self.candidates[name].report.evidence)


def package(
    dest: Path,
    name: str,
    description: str,
    capture: Capture,
    results: Mapping[str, TargetResult],
    tolerances: Mapping[str, Tolerance],
    classifiers: frozenset[str],
    session: SessionSettings,
    provenance: Provenance,
    labelled: tuple[LabelledData, Path] | None = None,
    own_rows: bool = False,
) -> Bundle:
    """Write and seal the bundle at `dest`, which must not exist, and open it.

    `labelled` is the record of labelled rows, and the folder with the files that it names. With
    `own_rows` the reference has rows of the user, and a profile of their columns is written too.

    Raises StageError if no target is verified; a target whose device is not here does not count.
    Raises BundleError if the bundle cannot be written.
    """
    if not any(result.status == "verified" for result in results.values()):
        reasons = "; ".join(_reasons_not_valid(result) for result in results.values())
        raise StageError(f"no artifact of {name!r} is valid: {reasons}")
    manifest = Manifest(
        name=name,
        description=description,
        signature=capture.signature.to_dict(),
        capture=CaptureRecord(
            torchscript=capture.torchscript,
            torchscript_note=capture.torchscript_note,
            precision=capture.precision,
            dependence=capture.why_dependent or "",
            tried=capture.tried,
        ),
        torchscript="model.ts" if capture.script else None,
        targets={
            target: _target_record(result, f"targets/{target}")
            for target, result in results.items()
        },
        tolerances=dict(tolerances),
        classifiers=sorted(classifiers),
        session=session,
        labelled=labelled[0] if labelled else None,
        provenance=provenance,
    )
    with write_atomically(dest) as folder:
        shutil.copy2(capture.program, folder / "program.pt2")
        shutil.copy2(capture.reference, folder / "reference.safetensors")
        if labelled:
            shutil.copytree(labelled[1], folder / Path(labelled[0].file).parent)
        if capture.script:
            shutil.copy2(capture.script, folder / "model.ts")
        for target, result in results.items():
            _write_artifacts(folder / "targets" / target, result, capture.signature)
        _write_reports(folder, results)
        if own_rows:
            (folder / PROFILE).write_text(
                profile_of_rows(capture.signature, capture.reference, capture.more).to_json()
            )
        (folder / "manifest.json").write_text(manifest.to_json())
        write_mlmodel(folder, manifest, example_input(capture))
        seal(folder)
    return Bundle.open(dest)


def package_annex(
    dest: Path,
    bundle: Bundle,
    result: TargetResult,
    tools: Mapping[str, str],
    host: Mapping[str, str],
    *,
    replace: bool = False,
) -> Annex:
    """Write and seal an annex of `bundle` at `dest`, and open it.

    `result` is of the target that the annex adds. `tools` and `host` describe where it was built,
    by name. With `replace`, an annex that is already at `dest` is replaced.

    Raises StageError if the target has no valid artifact, or no device here has run it; BundleError
    if the annex cannot be written.
    """
    if result.status != "verified" or result.benchmark is None:
        raise StageError(
            f"no artifact of {bundle.manifest.name!r} for {result.target} is valid: "
            f"{_reasons_not_valid(result)}"
        )
    timed = {contestant for times in result.benchmark.timings.values() for contestant in times}
    record = AnnexRecord(
        name=bundle.manifest.name,
        base=bundle.digest,
        target=result.target,
        record=_target_record(result, prefix_of(result.target).rstrip("/")),
        created=stamp.now(),
        by=stamp.user_at_host(),
        tools=dict(tools),
        host=dict(host),
        python=platform.python_version(),
        notes=[] if EAGER in timed else [NO_BASELINE],
    )
    with write_atomically(dest, replace=replace) as folder:
        _write_artifacts(folder, result, Signature.from_dict(bundle.manifest.signature))
        _write_reports(folder, {result.target: result})
        (folder / ANNEX).write_text(record.to_json())
        seal(folder)
    return Annex.open(dest)


def example_input(capture: Capture) -> dict[str, Any]:
    """An example of the inputs for MLflow, as arrays by field name.

    They are those of the smallest reference case in which every dimension has at least 2 rows; if
    there is no such case, of the smallest case.
    """
    reference = Reference.load(capture.reference)

    def preference(case: Mapping[str, int]) -> tuple[bool, int]:
        too_small = min(case.values()) < 2
        return too_small, sum(case.values())

    case = min(reference.cases, key=preference)
    inputs = inputs_at(capture.signature, reference.inputs, case)
    example: dict[str, Any] = {}
    for entry in fields(capture.signature, "input"):
        values = inputs[entry.collection][entry.column.name]
        example[entry.name] = values[: case[entry.rows]] if entry.rows else values.reshape(1)
    return example


def _reasons_not_valid(result: TargetResult) -> str:
    """Why no candidate of a target is valid, as text. Candidates with the same reason are named
    together: `cpu/x86-64-v3 lanes, aoti: reason; cpu/x86-64-v3 onnx: another reason`."""
    reasons: dict[str, list[str]] = {}
    for name, candidate in result.candidates.items():
        reasons.setdefault(candidate.report.why, []).append(name)
    return "; ".join(
        f"{result.target} {', '.join(names)}: {reason}" for reason, names in reasons.items()
    )


def _write_artifacts(folder: Path, result: TargetResult, signature: Signature) -> None:
    """Copy the files of each candidate that compiled into a folder named after its engine.

    An artifact that programs without Python can load gets a card, a text about the calling
    convention, which they read.
    """
    for engine_name, candidate in result.candidates.items():
        compiled = candidate.compiled
        if not compiled.outcome.ok or not compiled.files:
            continue
        out = folder / engine_name
        out.mkdir(parents=True)
        for file in compiled.files:
            shutil.copy2(compiled.folder / file, out / file)
        if any(out.glob("*.so")) or any(out.glob("*.kernel")):  # for programs without Python
            text = describe(signature, candidate.tile or None, candidate.report.windows)
            (out / CARD).write_text(text)


def _write_reports(folder: Path, results: Mapping[str, TargetResult]) -> None:
    """Write a JSON file of the validation, one of the benchmark and, if there are curves, one of
    these. Each holds its reports by target."""
    validated: dict[str, Any] = {}
    timed: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    for target, result in results.items():
        validated[target] = {
            name: candidate.report.for_others().to_dict()
            for name, candidate in result.candidates.items()
        }
        if result.benchmark:
            timed[target] = result.benchmark.to_dict()
        if result.curves:
            curves[target] = {metric: asdict(curve) for metric, curve in result.curves.items()}
    reports = {VALIDATION: validated, BENCHMARK: timed}
    if curves:
        reports[CURVES] = curves
    for name, data in reports.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(data, indent=1) + "\n")


def _target_record(result: TargetResult, folder: str) -> TargetRecord:
    """The manifest's record of a target. `folder` is that of its artifacts in the bundle."""
    return TargetRecord(
        status=result.status,
        chosen=result.chosen,
        below=[
            Below(rows=rows, engine=name)
            for rows, name in (result.benchmark.below if result.benchmark else ())
        ],
        raced_with=list(result.raced_with),
        metrics=dict(result.metrics),
        candidates={name: _candidate_record(result, name, folder) for name in result.candidates},
    )


def _candidate_record(result: TargetResult, engine_name: str, folder: str) -> CandidateRecord:
    """The manifest's record of the candidate of an engine. `folder` is as in `_target_record`."""
    candidate = result.candidates[engine_name]
    compiled, report = candidate.compiled, candidate.report
    timings = result.benchmark.timings if result.benchmark else {}
    return CandidateRecord(
        status=report.verdict,
        reason=report.for_others().reason,
        files=_bundle_files(folder, engine_name, compiled),
        options=dict(result.options.get(engine_name, {})),
        compile_seconds=round(compiled.seconds, 3),
        facts=compiled.facts,
        tile=candidate.tile or None,
        windows=report.windows,
        bits=report.bits,
        many_rows=report.many_rows,
        worst={
            output: Worst(
                max_abs=deviation.max_abs, max_rel=deviation.max_rel, outside=deviation.outside
            )
            for output, deviation in report.worst.items()
        },
        benchmark={
            case.removeprefix("n="): BenchmarkStats(
                median_us=times[engine_name].median_us,
                p05_us=times[engine_name].p05_us,
                p95_us=times[engine_name].p95_us,
            )
            for case, times in timings.items()
            if engine_name in times
        },
    )


def _bundle_files(folder: str, engine_name: str, compiled: Compiled) -> list[str]:
    """The paths of a candidate's files, relative to the bundle: its own files, else the portable
    file that it runs. The list is empty if the candidate did not compile."""
    if not compiled.outcome.ok:
        return []
    if compiled.files:
        return [f"{folder}/{engine_name}/{file}" for file in compiled.files]
    portable = engine(engine_name).portable_file(Portable(Path("program.pt2"), Path("model.ts")))
    return [str(portable)] if portable else []
