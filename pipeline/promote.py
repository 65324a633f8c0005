"""Promotion: measure what the gates ask for, here and now, then let them decide."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engines.target import Target, check_host_runs, host_runs
from registry.bundle import Bundle
from registry.errors import BundleError, NotFoundError
from registry.manifest import Manifest, Worst
from registry.promotion import Decision, SpeedComparison, SpeedPoint, decide
from registry.store import Registry
from registry.version import Version
from runtime.loader import open_choice, tolerances_of
from runtime.session import Session
from soa.signature import Signature
from stages.benchmark import benchmark_cases, filled_collections, race
from stages.reference import Reference
from stages.validate import ValidationReport, validate_candidate

Say = Callable[[str], None]
_SECONDS_A_SIZE = 1.0
_VALIDATION_LIMIT_S = 1800.0


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
    say: Say = lambda text: None,
) -> Promoted:
    """Ask every gate, measuring on this host; move the alias if all pass.

    Raises PromotionRefused with all decisions, and then nothing has changed.
    """
    version = registry.find(ref)
    replaced = _holder(registry, version.name, alias)
    say(f"checking the digests of {version.ref}")
    try:
        bundle = registry.open(version)
    except BundleError as error:
        decisions = [Decision("digests", False, "altered", "as sealed", str(error))]
        registry.promote(version, alias, decisions)  # always refuses, with the record's wording
        raise
    manifest = bundle.manifest
    gates = manifest.provenance.config.get("gates", {})
    targets = list(gates.get("required_targets") or manifest.targets)
    targets = [str(Target.parse(name)) for name in targets]
    decisions = decide(
        manifest,
        targets=targets,
        digest_ok=True,
        revalidation=_revalidate(bundle, targets, say),
        speed=_compare_speed(registry, bundle, version, replaced, targets, say),
        max_slowdown=gates.get("max_slowdown", 1.1) if max_slowdown is None else max_slowdown,
        max_outside=gates.get("max_outside", 0.0),
        allow_unverified=allow_unverified,
    )
    promoted = registry.promote(version, alias, decisions)
    other = replaced if replaced and replaced.number != version.number else None
    return Promoted(promoted, tuple(decisions), other)


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
        other = registry.open(replaced)
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
            bindings: dict[str, Any] = {}
            for side, (session, inputs) in sides.items():
                given, written = filled_collections(session.signature, inputs, case, session.device)
                bindings[side] = session.bind(given, written)
            timed = race(bindings, _SECONDS_A_SIZE)
            rows = max(case.values())
            points.append(SpeedPoint(target, rows, timed["new"].median_us, timed["old"].median_us))
    finally:
        torch.set_num_threads(threads)
    return points


def _session(bundle: Bundle, target: str, signature: Signature) -> Session:
    return Session(signature, open_choice(bundle, target, torch.device("cpu")))


def _fits(signature: Signature, case: Mapping[str, int]) -> bool:
    return set(signature.dims) == set(case) and all(
        signature.ranges[dim].min <= n <= signature.ranges[dim].max for dim, n in case.items()
    )
