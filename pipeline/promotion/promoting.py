"""Promotion: measure what the gates ask for, here and now, then let them decide."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from engines.target import Target, check_host_runs, host_runs
from pipeline.config import GatesConfig, ReferenceConfig, load_policy, part_of
from registry.bundle import Bundle, Manifest, Worst
from registry.errors import BundleError, NotFoundError, SignatureError
from registry.history import PRODUCTION, STAGING, Event, approvers, check_promotable, promoted_since
from registry.mlflow import Version
from registry.promotion import (
    Approvals,
    Asked,
    Decision,
    Proof,
    Requirements,
    SetResult,
    SpeedComparison,
    SpeedPoint,
    Staging,
    check_override,
    decide,
    strictest,
)
from registry.promotion import Signature as SignatureFound
from registry.promotion import override as overridden
from registry.store import Registry
from registry.trust import trusted
from runtime.loader import measured_session, tolerances_of
from runtime.opening import Opened, Opening, held_files, open_version
from soa.options import known_options
from soa.signature import Signature
from stages.benchmark import benchmark_cases, bound_call, race
from stages.reference import Reference, proof_of, too_much
from stages.validation import ValidationReport, validate_candidate, validate_on_set

Say = Callable[[str], None]
_SECONDS_A_SIZE = 1.0
_VALIDATION_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Assessment:
    """Every gate's answer for a version, measured here and now."""

    version: Version
    alias: str
    decisions: tuple[Decision, ...]
    replaced: Version | None
    """The version that holds the alias, and was measured against."""
    policies: tuple[str, ...]
    annexes: tuple[str, ...] = ()
    """Targets built later that the gates saw too."""

    @property
    def passed(self) -> bool:
        return all(decision.lets_pass for decision in self.decisions)


@dataclass(frozen=True)
class Promoted:
    """A promotion that passed, with every gate's decision."""

    version: Version
    decisions: tuple[Decision, ...]
    replaced: Version | None


@known_options()
def promote(
    registry: Registry,
    ref: str,
    alias: str,
    *,
    allow_unverified: frozenset[str] = frozenset(),
    max_slowdown: float | None = None,
    policy: Path | None = None,
    override: frozenset[str] = frozenset(),
    reason: str = "",
    say: Say = lambda text: None,
) -> Promoted:
    """Ask every gate, measuring on this host; move the alias if all let the version pass.

    The arguments are those of `assess`. Raises PromotionRefused with all decisions; then nothing
    has changed but the history, which has the refusal.
    """
    found = assess(
        registry,
        ref,
        alias,
        allow_unverified=allow_unverified,
        max_slowdown=max_slowdown,
        policy=policy,
        override=override,
        reason=reason,
        say=say,
    )
    promoted = registry.promote(
        found.version,
        alias,
        found.decisions,
        replacing=found.replaced.number if found.replaced else 0,
        policies=found.policies,
        annexes=found.annexes,
        reason=reason,
    )
    same = found.replaced is not None and found.replaced.number == promoted.number
    return Promoted(promoted, found.decisions, None if same else found.replaced)


def assess(
    registry: Registry,
    ref: str,
    alias: str,
    *,
    allow_unverified: frozenset[str] = frozenset(),
    max_slowdown: float | None = None,
    policy: Path | None = None,
    override: frozenset[str] = frozenset(),
    reason: str = "",
    say: Say = lambda text: None,
) -> Assessment:
    """Ask every gate, measuring on this host, and change nothing.

    The gates of the config that built the version (`max_slowdown` in place of its own), the
    registry's policies and the file `policy` count together: the strictest of each.
    `allow_unverified` excuses targets that no policy names. `override` names gates that may refuse
    without stopping the promotion, for `reason`, which stays in the history in any case.

    Of the targets that were built later, those that this host runs go through the gates with the
    bundle's own; the others are left aside, and wait for a promotion on a host of their kind.
    """
    check_promotable(alias)
    check_override(override, reason)
    version = registry.find(ref)
    replaced = _holder(registry, version.name, alias)
    local = [] if policy is None else [load_policy(policy)]
    say(f"checking the digests of {version.ref}")
    try:
        opened = _open(registry, version)
    except BundleError as error:
        altered = (Decision("digests", False, "altered", "as sealed", str(error)),)
        return Assessment(
            version,
            alias,
            altered,
            replaced,
            tuple(a.origin for a in registry.policies(version.name)),
        )
    bundle = opened.bundle
    with tempfile.TemporaryDirectory(prefix="soa-policy-") as folder:
        asked = [*registry.policies(version.name, Path(folder)), *local]
        needed = _requirements(bundle, max_slowdown, asked)
        targets = list(needed.targets)
        events = registry.history(version.name)
        in_production = alias == PRODUCTION
        decisions = decide(
            bundle.manifest,
            targets=targets,
            digest_ok=True,
            revalidation=_revalidate(opened, targets, say),
            proof=_proof(bundle),
            speed=_compare_speed(registry, opened, version, replaced, targets, say),
            max_slowdown=needed.max_slowdown,
            max_outside=needed.max_outside,
            allow_unverified=allow_unverified,
            named_targets=needed.named_targets,
            max_outside_by_output=needed.max_outside_by_output,
            sets=[
                result
                for reference in needed.references
                for result in _on_set(opened, targets, reference.path, say)
            ],
            staging=_staging(events, version, needed) if in_production else None,
            approvals=_approvals(events, version, needed) if in_production else None,
            signature=_signature(registry, version, bundle, needed) if in_production else None,
        )
    decisions = overridden(decisions, override, reason)
    return Assessment(
        version, alias, tuple(decisions), replaced, needed.origins, tuple(bundle.annexes)
    )


def _requirements(
    bundle: Bundle, max_slowdown: float | None, policies: Sequence[Asked]
) -> Requirements:
    gates = part_of(bundle.manifest, "gates", GatesConfig, {})
    targets = [*(gates.required_targets or bundle.manifest.targets), *bundle.annexes]
    return strictest(
        list(dict.fromkeys(str(Target.parse(name)) for name in targets)),
        gates.max_outside,
        gates.max_slowdown if max_slowdown is None else max_slowdown,
        policies,
    )


def _staging(events: Sequence[Event], version: Version, needed: Requirements) -> Staging | None:
    if not needed.min_time_in_staging:
        return None
    since = promoted_since(events, STAGING, version.number)
    found = None if since is None else datetime.now(UTC) - since
    return Staging(found, needed.min_time_in_staging)


def _approvals(events: Sequence[Event], version: Version, needed: Requirements) -> Approvals | None:
    if not needed.approvals:
        return None
    return Approvals(needed.approvals, approvers(events, version.number, version.digest).keys())


def _signature(
    registry: Registry, version: Version, bundle: Bundle, needed: Requirements
) -> SignatureFound | None:
    """Each policy that names keys asks for one of its own."""
    if not needed.signed_by:
        return None
    groups = [[trusted(pem, "a policy") for pem in pems] for pems in needed.signed_by]
    names = " and ".join(" or ".join(key.fingerprint[:16] for key in keys) for keys in groups)
    try:
        found = [registry.require_signature(version, bundle, keys) for keys in groups]
    except SignatureError as error:
        return SignatureFound(names, error=f"{error} (pipeline sign)")
    return SignatureFound(names, found[0].fingerprint[:16])


def _nonfinite_limit(bundle: Bundle) -> float:
    """The fraction of an output's reference values that may be NaN or infinite."""
    return part_of(bundle.manifest, "reference", ReferenceConfig, {}).nonfinite


def _proof(bundle: Bundle) -> Proof:
    counts, _ = proof_of(bundle)
    limit = _nonfinite_limit(bundle)
    return Proof(max(one.share for one in counts), limit, too_much(counts, limit))


def _on_set(opened: Opened, targets: list[str], inputs: Path, say: Say) -> Iterator[SetResult]:
    """The chosen artifact of each target that this host runs, on a larger reference set."""
    manifest = opened.bundle.manifest
    for target in runnable(targets):
        record = manifest.targets.get(target)
        if record is None or record.chosen is None:
            continue
        for name in record.engines():
            say(f"comparing {name} on {target} with the portable program on {inputs.name}")
            with (
                tempfile.TemporaryDirectory(prefix="soa-validate-") as folder,
                held_files(opened, target, name) as held,
            ):
                report = validate_on_set(
                    name,
                    held.file(record.candidates[name].files[0]),
                    held.file(manifest.program),
                    inputs,
                    opened.signature,
                    tolerances_of(manifest),
                    Path(folder),
                    _VALIDATION_LIMIT_S,
                    Target.parse(target).torch_device,
                    manifest.capture.precision,
                    _nonfinite_limit(opened.bundle),
                )
            worst = _worst(manifest, report) if report.cases else None
            yield SetResult(inputs.name, target, name, worst, report.reason or "")


def revalidate(
    opened: Opened, target: str, engine_name: str, say: Say = lambda text: None
) -> ValidationReport:
    """Validate one artifact of a version again on this host, in a process of its own."""
    manifest = opened.bundle.manifest
    candidate = manifest.targets[target].candidates[engine_name]
    if not candidate.files:
        return ValidationReport.failed(engine_name, candidate.reason or "no artifact")
    check_host_runs(Target.parse(target))
    say(f"validating {engine_name} on {target} against the reference")
    with (
        tempfile.TemporaryDirectory(prefix="soa-validate-") as folder,
        held_files(opened, target, engine_name) as held,
    ):
        return validate_candidate(
            engine_name,
            held.file(candidate.files[0]),
            opened.signature,
            held.file(manifest.reference),
            tolerances_of(manifest),
            frozenset(manifest.classifiers),
            Path(folder),
            _VALIDATION_LIMIT_S,
            Target.parse(target).torch_device,
            manifest.capture.precision,
        )


def runnable(targets: list[str]) -> list[str]:
    """Those of the targets that this host runs."""
    return [target for target in targets if host_runs(Target.parse(target))]


def _open(registry: Registry, version: Version) -> Opened:
    """To be measured, promoted or not; of what was built later, only what this host runs."""
    opening = Opening(version.ref, mode="test", registry=registry)
    return open_version(opening, annexes=runnable(list(version.annexes)))


def _holder(registry: Registry, name: str, alias: str) -> Version | None:
    try:
        return registry.find(f"{name}@{alias}")
    except NotFoundError:
        return None


def _revalidate(
    opened: Opened, targets: list[str], say: Say
) -> Mapping[str, Mapping[str, Worst] | None]:
    found: dict[str, Mapping[str, Worst] | None] = {}
    for target in runnable(targets):
        record = opened.bundle.manifest.targets.get(target)
        if record is None or record.chosen is None:
            continue
        reports = [revalidate(opened, target, name, say) for name in record.engines()]
        found[target] = _worst_of_all([_worst(opened.bundle.manifest, each) for each in reports])
    return found


def _worst_of_all(parts: Sequence[Mapping[str, Worst]]) -> Mapping[str, Worst]:
    """The worst of each output over the engines that share a target's row counts."""
    return {
        name: max((part[name] for part in parts), key=lambda w: (w.outside, w.max_abs))
        for name in parts[0]
        if all(name in part for part in parts)
    }


def _worst(manifest: Manifest, report: ValidationReport) -> Mapping[str, Worst]:
    """Worst deviations by output; a run that failed for another reason counts as all outside."""
    if report.valid or (report.worst and all(not case.faults for case in report.cases)):
        return {
            name: Worst(max_abs=d.max_abs, max_rel=d.max_rel, outside=d.outside)
            for name, d in report.worst.items()
        }
    everything = Worst(max_abs=float("inf"), max_rel=float("inf"), outside=1.0)
    return dict.fromkeys(manifest.tolerances, everything)


def _compare_speed(
    registry: Registry,
    opened: Opened,
    version: Version,
    replaced: Version | None,
    targets: list[str],
    say: Say,
) -> SpeedComparison | None:
    """Both versions side by side in this process, each on its own reference inputs."""
    if replaced is None or replaced.number == version.number:
        return None
    try:
        other = _open(registry, replaced)
    except BundleError as error:
        say(f"{replaced.ref}, which is in place, cannot be opened: {error}")
        return SpeedComparison(replaced.ref, ())  # not measured: the gate refuses
    points: list[SpeedPoint] = []
    for target in runnable(targets):
        records = [each.bundle.manifest.targets.get(target) for each in (opened, other)]
        if any(record is None or record.chosen is None for record in records):
            continue
        say(f"timing {version.ref} beside {replaced.ref} on {target}")
        points += _race_versions(opened, other, target)
    return SpeedComparison(replaced.ref, tuple(points))


def _race_versions(new: Opened, old: Opened, target: str) -> list[SpeedPoint]:
    points: list[SpeedPoint] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sides = {
            side: (
                measured_session(opened, target),
                Reference.load(
                    opened.bundle.file(opened.bundle.manifest.reference), opened.signature
                ).inputs,
            )
            for side, opened in (("new", new), ("old", old))
        }
        for case in benchmark_cases(new.signature):
            if not _fits(old.signature, case):
                continue
            calls = {
                side: bound_call(session, inputs, case) for side, (session, inputs) in sides.items()
            }
            timed = race(calls, _SECONDS_A_SIZE)
            rows = max(case.values())
            points.append(SpeedPoint(target, rows, timed["new"].median_us, timed["old"].median_us))
    finally:
        torch.set_num_threads(threads)
    return points


def _fits(signature: Signature, case: Mapping[str, int]) -> bool:
    return set(signature.dims) == set(case) and all(
        signature.ranges[dim].min <= n <= signature.ranges[dim].max for dim, n in case.items()
    )
