"""Measures, on this host, everything that the gates judge."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from engines.target import Target, check_host_runs, torch_runs
from pipeline.config import BuiltFrom
from pipeline.promotion.measuring_bounds import InPlace, measure_bounds, measure_shadow
from registry.bundle import Manifest, Worst
from registry.errors import BundleError, TrustError
from registry.history import STAGING, approvers, promoted_since
from registry.promotion import (
    Bits,
    Findings,
    Proof,
    Requirements,
    SetResult,
    SignatureCheck,
    SpeedComparison,
    SpeedPoint,
)
from registry.shadow_record import ShadowRecord
from registry.store import Registry
from registry.trust import parse_trusted
from registry.version import Version
from runtime.checked import recorded_tolerances
from runtime.loader import open_measured_session
from runtime.opening import Opened, Opening, hold_files, open_version
from soa.signature import Signature
from stages.capture import SEE_EACH_OTHER, dependence_of
from stages.errors import NotMeasuredError
from stages.judging import (
    Trial,
    emulate_candidate,
    emulator_on_this_gpu,
    reproduce,
    validate_candidate,
)
from stages.reference import Arrays, Reference, read_proof, why_too_nonfinite
from stages.reports import ValidationReport
from stages.timing import benchmark_cases, bind_call, one_thread, race

Say = Callable[[str], None]
_SECONDS_A_SIZE = 1.0
_VALIDATION_LIMIT_S = 1800.0


def open_to_measure(registry: Registry, version: Version) -> Opened:
    """Open a version, promoted or not, with the annexes of targets that this host runs."""
    opening = Opening(version.ref, mode="test", registry=registry)
    return open_version(opening, annexes=runnable(version.annexes))


def measure(
    registry: Registry,
    opened: Opened,
    version: Version,
    replaced: Version | None,
    needed: Requirements,
    allow_unverified: frozenset[str],
    shadows: Sequence[ShadowRecord] | None,
    say: Say,
) -> Findings:
    """Measure on this host all that the gates judge of an opened version.

    `replaced`: the version that has the alias now, or None. `needed`: what config and policies
    require. `allow_unverified`: targets that may pass without having run. `shadows`: records of
    shadows to add to those in the registry; None if the alias needs no shadow.
    """
    manifest = opened.bundle.manifest
    served = _engines_by_target(manifest, needed)
    worst = {target: _validate_engines(opened, target, served[target], say) for target in served}
    in_place = _open_in_place(registry, version, replaced, say)
    limit = BuiltFrom(manifest).reference.nonfinite
    counts, _ = read_proof(opened.bundle)
    events = registry.history(version.name)
    since = promoted_since(events, STAGING, version.number)
    artifacts = [(target, engine) for target, engines in served.items() for engine in engines]
    measured = list(measure_bounds(opened, in_place, list(served), say))
    if shadows is not None:
        measured += measure_shadow(opened, version, replaced, shadows)
    bits: list[Bits] = []
    if needed.reproducible:
        for target, engine in artifacts:
            bits += _digest_outputs(opened, target, engine, say)
    return Findings(
        manifest,
        needed,
        Proof(max(count.share for count in counts), limit, why_too_nonfinite(counts, limit)),
        worst,
        allow_unverified=allow_unverified,
        sets=[
            _compare_on_set(opened, target, engine, reference.path, limit, say)
            for reference in needed.references
            for target, engine in artifacts
        ],
        speed=_compare_speed(opened, in_place, list(served), say),
        in_staging=None if since is None else datetime.now(UTC) - since,
        approved_by=approvers(events, version.number, version.digest).keys(),
        signature=_check_signature(registry, version, opened, needed),
        bounded=measured,
        bits=bits,
    )


def _engines_by_target(manifest: Manifest, needed: Requirements) -> dict[str, list[str]]:
    """Return the engines that serve each needed target that has an artifact and runs here."""
    served = {}
    for target in runnable(needed.targets):
        record = manifest.targets.get(target)
        if record is not None and record.chosen is not None:
            served[target] = record.engines()
    return served


def runnable(targets: Sequence[str] | Mapping[str, object]) -> list[str]:
    """Return those of the targets that this host can run with torch, in their order."""
    return [target for target in targets if torch_runs(Target.parse(target))]


def revalidate(
    opened: Opened, target: str, engine_name: str, say: Say = lambda text: None
) -> ValidationReport:
    """Validate one artifact of a version again on this host, in a child process.

    An engine that has no artifact for the target gets a report that says why. An artifact that
    should also run on windows, parts of larger collections, is refused if it fails there.
    """
    manifest = opened.bundle.manifest
    candidate = manifest.targets[target].candidates[engine_name]
    if not candidate.files:
        reason = candidate.reason or "no artifact"
        if candidate.status == "not applicable":
            return ValidationReport.not_applicable(engine_name, reason)
        return ValidationReport.failed(engine_name, reason)
    parsed = Target.parse(target)
    check_host_runs(parsed)
    say(f"validating {engine_name} on {target} against the reference")
    if torch_runs(parsed):
        report = _validate(opened, target, engine_name)
    else:
        report = _validate_by_driver(opened, target, engine_name)
    if report.reason:
        say(f"{engine_name} on {target} is refused: {report.why}")
    if candidate.windows and report.window and report.valid:
        return replace(report, valid=False, reason=report.window, worst={})
    return report


def _compare_on_set(
    opened: Opened, target: str, engine_name: str, inputs: Path, nonfinite: float, say: Say
) -> SetResult:
    """Compare one artifact with the portable program on a larger set of reference inputs.

    `inputs`: the file of the set. `nonfinite`: the share of its values that may be NaN or infinite.
    """
    say(f"comparing {engine_name} on {target} with the portable program on {inputs.name}")
    report = _validate(opened, target, engine_name, inputs.resolve(), nonfinite)
    worst = _worst_deviations(opened, target, report)
    return SetResult(
        inputs.name, target, engine_name, worst if report.cases else None, report.reason or ""
    )


def _validate(
    opened: Opened,
    target: str,
    engine_name: str,
    inputs: Path | None = None,
    nonfinite: float = 0.0,
) -> ValidationReport:
    """Validate one artifact on the reference of the version.

    With `inputs`, a file, it is instead compared with the portable program on these inputs, of
    whose values the share `nonfinite` may be NaN or infinite.
    """
    manifest = opened.bundle.manifest
    candidate = manifest.targets[target].candidates[engine_name]
    with _open_trial(opened, target, engine_name) as (trial, folder):
        program = trial.program
        assert program is not None  # `_open_trial` sets it
        dependence = dependence_of(manifest.capture.dependence, program) if candidate.tile else None
        if dependence:
            return ValidationReport.refused(
                engine_name, f"{SEE_EACH_OTHER}: {dependence}", "candidate-rows"
            )
        if inputs is not None:
            trial = replace(trial, reference=inputs, set_nonfinite=nonfinite)
        device = Target.parse(target).torch_device
        return validate_candidate(trial, folder, _VALIDATION_LIMIT_S, device)


@contextmanager
def _open_trial(opened: Opened, target: str, engine_name: str) -> Iterator[tuple[Trial, Path]]:
    """Yield what a validation needs to know of an artifact, and a folder for scratch files.

    The files of the artifact and the reference are held: they cannot be replaced meanwhile.
    """
    manifest = opened.bundle.manifest
    candidate = manifest.targets[target].candidates[engine_name]
    with (
        tempfile.TemporaryDirectory(prefix="soa-validate-") as folder,
        hold_files(opened, target, engine_name) as held,
    ):
        trial = Trial(
            engine_name,
            file=held.file(candidate.files[0]),
            signature=opened.signature,
            reference=held.file(manifest.reference),
            tolerances=recorded_tolerances(manifest),
            classifiers=frozenset(manifest.classifiers),
            precision=manifest.capture.precision,
            tile=candidate.tile or 0,
            program=held.file(manifest.program),
            special_values=BuiltFrom(manifest).gates.special_values,
        )
        yield trial, Path(folder)


def _validate_by_driver(opened: Opened, target: str, engine_name: str) -> ValidationReport:
    """Validate one artifact on a GPU of this host that torch does not support.

    An artifact that passes is valid and not merely `emulated`, since it ran on a device of its
    target, although the code that runs it is that of emulators.
    """
    parsed = Target.parse(target)
    with _open_trial(opened, target, engine_name) as (trial, folder):
        report = emulate_candidate(
            trial, folder, _VALIDATION_LIMIT_S, parsed, emulator=emulator_on_this_gpu(parsed)
        )
    if report.evidence != "emulated":
        return report
    return replace(report, valid=True, reason=None, code="")


def _digest_outputs(opened: Opened, target: str, engine_name: str, say: Say) -> list[Bits]:
    """Run one artifact in several ways, and return the digests of its outputs.

    The ways differ by the processor that is emulated, the number of threads, and the tiles.
    """
    say(f"comparing the bits of {engine_name} on {target}")
    with tempfile.TemporaryDirectory(prefix="soa-reproduce-") as folder:
        return list(reproduce(opened, target, engine_name, Path(folder)))


def _validate_engines(
    opened: Opened, target: str, engines: Sequence[str], say: Say
) -> Mapping[str, Worst]:
    """Validate all engines of one target again; return the worst deviation of each output.

    An output that the report of one engine lacks is left out.
    """
    deviations = [
        _worst_deviations(opened, target, revalidate(opened, target, engine, say))
        for engine in engines
    ]
    return {
        name: max((of_engine[name] for of_engine in deviations), key=_badness)
        for name in deviations[0]
        if all(name in of_engine for of_engine in deviations)
    }


def _badness(deviation: Worst) -> tuple[float, float]:
    """Return a key that orders deviations: first by the share of values outside the tolerance."""
    return deviation.outside, deviation.max_abs


def _worst_deviations(opened: Opened, target: str, report: ValidationReport) -> Mapping[str, Worst]:
    """Return the worst deviations in a report, by output.

    If the run failed, or a case has faults of another kind, all values count as outside the
    tolerance. Raises NotMeasuredError if the run ended for want of memory or time, which says
    nothing about the artifact.
    """
    if report.ended_early:
        raise NotMeasuredError(
            f"{opened.label}: {report.engine} on {target} could not be validated: {report.reason}"
        )
    if report.valid or (report.worst and all(not case.faults for case in report.cases)):
        return {
            name: Worst(max_abs=worst.max_abs, max_rel=worst.max_rel, outside=worst.outside)
            for name, worst in report.worst.items()
        }
    all_outside = Worst(max_abs=float("inf"), max_rel=float("inf"), outside=1.0)
    return dict.fromkeys(opened.bundle.manifest.tolerances, all_outside)


def _check_signature(
    registry: Registry, version: Version, opened: Opened, needed: Requirements
) -> SignatureCheck | None:
    """Check that for each policy that names keys, one of these keys signed the version.

    Returns None if no policy names keys.
    """
    if not needed.signed_by:
        return None
    groups = [[parse_trusted(pem, "a policy") for pem in pems] for pems in needed.signed_by]
    names = " and ".join(" or ".join(key.fingerprint[:16] for key in keys) for keys in groups)
    try:
        signers = [registry.require_signature(version, opened.bundle, keys) for keys in groups]
    except TrustError as error:
        return SignatureCheck(names, error=f"{error} (pipeline sign)")
    return SignatureCheck(names, signers[0].fingerprint[:16])


def _open_in_place(
    registry: Registry, version: Version, replaced: Version | None, say: Say
) -> InPlace | None:
    """Open the version that has the alias.

    Returns None if there is none, or if it is `version` itself.
    """
    if replaced is None or replaced.number == version.number:
        return None
    try:
        return InPlace(replaced.ref, open_to_measure(registry, replaced))
    except BundleError as error:
        say(f"{replaced.ref}, which is in place, cannot be opened: {error}")
        return InPlace(replaced.ref, opened=None)


def _compare_speed(
    opened: Opened, in_place: InPlace | None, targets: Sequence[str], say: Say
) -> SpeedComparison | None:
    """Time both versions side by side in this process, each on its own reference inputs.

    Returns None if no other version has the alias. If that one cannot be opened, the comparison has
    no points, and the gate refuses it.
    """
    if in_place is None:
        return None
    other = in_place.opened
    if other is None:
        return SpeedComparison(in_place.ref, points=())
    points: list[SpeedPoint] = []
    for target in targets:
        record = other.bundle.manifest.targets.get(target)
        if record is None or record.chosen is None:
            continue
        say(f"timing {opened.label} beside {in_place.ref} on {target}")
        points += _race_versions(opened, other, target)
    return SpeedComparison(in_place.ref, tuple(points))


def _race_versions(new: Opened, old: Opened, target: str) -> list[SpeedPoint]:
    """Time both versions at each number of rows that both accept, on one thread."""
    points: list[SpeedPoint] = []
    with one_thread():
        versions = {"new": new, "old": old}
        sessions = {
            side: open_measured_session(opened, target) for side, opened in versions.items()
        }
        inputs = {side: _load_reference_inputs(opened) for side, opened in versions.items()}
        for case in benchmark_cases(new.signature):
            if not _accepts_case(old.signature, case):
                continue
            calls = {side: bind_call(sessions[side], inputs[side], case) for side in versions}
            times = race(calls, _SECONDS_A_SIZE)
            rows = max(case.values())
            points.append(SpeedPoint(target, rows, times["new"].median_us, times["old"].median_us))
    return points


def _load_reference_inputs(opened: Opened) -> Arrays:
    """Load the inputs of a version's reference, as arrays by collection and column."""
    path = opened.bundle.file(opened.bundle.manifest.reference)
    return Reference.load(path, opened.signature).inputs


def _accepts_case(signature: Signature, case: Mapping[str, int]) -> bool:
    """Return whether a model takes the numbers of rows of a case, for just its row dimensions."""
    ranges = signature.ranges
    return set(signature.dims) == set(case) and all(
        ranges[dim].min <= n <= ranges[dim].max for dim, n in case.items()
    )
