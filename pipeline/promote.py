"""Promotion: measure what the gates ask for, here and now, then let them decide."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from engines.target import Target, check_host_runs, host_runs
from pipeline.policy import load_policy
from registry.bundle import Bundle
from registry.errors import BundleError, NotFoundError, SignatureError
from registry.history import Event, approvers, promoted_since
from registry.manifest import Manifest, Worst
from registry.moves import PRODUCTION, STAGING, check_promotable
from registry.policy import Asked, Requirements, strictest
from registry.promotion import (
    Approvals,
    Decision,
    SetResult,
    SpeedComparison,
    SpeedPoint,
    Staging,
    check_override,
    decide,
)
from registry.promotion import Signature as SignatureFound
from registry.promotion import override as overridden
from registry.signing import trusted
from registry.store import Registry
from registry.version import Version
from runtime.loader import open_choice, tolerances_of
from runtime.session import Session
from soa.signature import Signature
from stages.benchmark import benchmark_cases, bound_call, race
from stages.reference import Reference
from stages.reference_set import validate_on_set
from stages.validate import ValidationReport, validate_candidate

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
        bundle = registry.open(version, annexes=runnable(list(version.annexes)))
    except BundleError as error:
        altered = (Decision("digests", False, "altered", "as sealed", str(error)),)
        return Assessment(
            version,
            alias,
            altered,
            replaced,
            tuple(a.origin for a in registry.policies(version.name)),
        )
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
            revalidation=_revalidate(bundle, targets, say),
            speed=_compare_speed(registry, bundle, version, replaced, targets, say),
            max_slowdown=needed.max_slowdown,
            max_outside=needed.max_outside,
            allow_unverified=allow_unverified,
            named_targets=needed.named_targets,
            max_outside_by_output=needed.max_outside_by_output,
            sets=[
                result
                for reference in needed.references
                for result in _on_set(bundle, targets, reference.path, say)
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
    gates = bundle.manifest.provenance.config.get("gates", {})
    targets = [*(gates.get("required_targets") or bundle.manifest.targets), *bundle.annexes]
    return strictest(
        list(dict.fromkeys(str(Target.parse(name)) for name in targets)),
        gates.get("max_outside", 0.0),
        gates.get("max_slowdown", 1.1) if max_slowdown is None else max_slowdown,
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


def _on_set(bundle: Bundle, targets: list[str], inputs: Path, say: Say) -> Iterator[SetResult]:
    """The chosen artifact of each target that this host runs, on a larger reference set."""
    manifest = bundle.manifest
    for target in runnable(targets):
        record = manifest.targets.get(target)
        if record is None or record.chosen is None:
            continue
        for name in record.engines():
            say(f"comparing {name} on {target} with the portable program on {inputs.name}")
            with tempfile.TemporaryDirectory(prefix="soa-validate-") as folder:
                report = validate_on_set(
                    name,
                    bundle.file(record.candidates[name].files[0]),
                    bundle.file(manifest.program),
                    inputs,
                    Signature.from_dict(manifest.signature),
                    tolerances_of(manifest),
                    Path(folder),
                    _VALIDATION_LIMIT_S,
                    Target.parse(target).torch_device,
                    manifest.capture.precision,
                )
            yield SetResult(inputs.name, target, name, _worst(manifest, report))


def revalidate(
    bundle: Bundle, target: str, engine_name: str, say: Say = lambda text: None
) -> ValidationReport:
    """Validate one artifact of a bundle again on this host, in a process of its own."""
    manifest = bundle.manifest
    candidate = manifest.targets[target].candidates[engine_name]
    if not candidate.files:
        return ValidationReport.failed(engine_name, candidate.reason or "no artifact")
    check_host_runs(Target.parse(target))
    say(f"validating {engine_name} on {target} against the reference")
    with tempfile.TemporaryDirectory(prefix="soa-validate-") as folder:
        return validate_candidate(
            engine_name,
            bundle.file(candidate.files[0]),
            Signature.from_dict(manifest.signature),
            bundle.file(manifest.reference),
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


def _holder(registry: Registry, name: str, alias: str) -> Version | None:
    try:
        return registry.find(f"{name}@{alias}")
    except NotFoundError:
        return None


def _revalidate(
    bundle: Bundle, targets: list[str], say: Say
) -> Mapping[str, Mapping[str, Worst] | None]:
    found: dict[str, Mapping[str, Worst] | None] = {}
    for target in runnable(targets):
        record = bundle.manifest.targets.get(target)
        if record is None or record.chosen is None:
            continue
        reports = [revalidate(bundle, target, name, say) for name in record.engines()]
        found[target] = _worst_of_all([_worst(bundle.manifest, report) for report in reports])
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
    bundle: Bundle,
    version: Version,
    replaced: Version | None,
    targets: list[str],
    say: Say,
) -> SpeedComparison | None:
    """Both versions side by side in this process, each on its own reference inputs."""
    if replaced is None or replaced.number == version.number:
        return None
    try:
        other = registry.open(replaced, annexes=runnable(list(replaced.annexes)))
    except BundleError as error:
        say(f"{replaced.ref}, which is in place, cannot be opened: {error}")
        return SpeedComparison(replaced.ref, ())  # not measured: the gate refuses
    points: list[SpeedPoint] = []
    for target in runnable(targets):
        records = [b.manifest.targets.get(target) for b in (bundle, other)]
        if any(record is None or record.chosen is None for record in records):
            continue
        say(f"timing {version.ref} beside {replaced.ref} on {target}")
        points += _race_versions(bundle, other, target)
    return SpeedComparison(replaced.ref, tuple(points))


def _race_versions(new: Bundle, old: Bundle, target: str) -> list[SpeedPoint]:
    signatures = {"new": Signature.from_dict(new.manifest.signature),
                  "old": Signature.from_dict(old.manifest.signature)}  # fmt: skip
    points: list[SpeedPoint] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sides = {
            side: (
                _session(bundle, target, signatures[side]),
                Reference.load(bundle.file(bundle.manifest.reference)).inputs,
            )
            for side, bundle in (("new", new), ("old", old))
        }
        for case in benchmark_cases(signatures["new"]):
            if not _fits(signatures["old"], case):
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


def _session(bundle: Bundle, target: str, signature: Signature) -> Session:
    device = torch.device(Target.parse(target).torch_device)
    return Session(signature, open_choice(bundle, target, device), device)


def _fits(signature: Signature, case: Mapping[str, int]) -> bool:
    return set(signature.dims) == set(case) and all(
        signature.ranges[dim].min <= n <= signature.ranges[dim].max for dim, n in case.items()
    )
