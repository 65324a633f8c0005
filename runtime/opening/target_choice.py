"""Choose which of a version's targets and engines runs on this host, or say why none does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engines.base import WITHOUT_TORCH, Executable
from engines.errors import TargetError
from engines.target import Target, best_target, check_host_runs, choose_target, gpu_target
from registry.bundle import Manifest, TargetRecord, attach
from runtime.errors import LoadError
from runtime.opening.artifact import open_artifact
from runtime.opening.first_use import WAITING, validate_here
from runtime.opening.request import Builder, Opened
from runtime.opening.same_bits import warn_of_other_bits
from runtime.process import settle_tf32, settle_threads, torch_runs_on

if TYPE_CHECKING:
    import torch

    from runtime.session import Origin


_AS_FAST = 1.03
"""A lower CPU level is as fast as the highest one if it needs less than so many times its time."""


@dataclass(frozen=True)
class OpenedHere:
    """An artifact that was opened on this host, and what is known about it."""

    executable: Executable
    origin: Origin
    any_start: bool
    """Whether the artifact was validated on windows that begin at any row."""


def open_here(opened: Opened, device: torch.device) -> OpenedHere:
    """Choose the artifact to run on a device of this host, check it, and open it.

    It also applies the settings that the artifact needs to this process. Raises LoadError or
    TargetError if nothing of the version may run here.
    """
    opening = opened.opening
    if opening.builder is not None:
        opened = _build_missing_target(opened, device, opening.target, opening.builder)
    by_torch = torch_runs_on(device)
    if opening.engine_name is None and not by_torch:
        opened = _keep_targets_without_torch(opened, device)
    target = choose(opened, device, opening.target)
    if device.type == "cuda" and not by_torch:
        _require_no_torch(opened, target)
    if opening.prover is not None:
        opened = validate_here(opened, target, device, opening.prover)
    _require_engine(opened, target, opening.engine_name)
    manifest = opened.bundle.manifest
    if device.type == "cuda" and by_torch:
        settle_tf32(manifest.capture.precision == "tf32", manifest.name)
    instances = opening.instances or manifest.session.instances
    artifact = open_artifact(opened, target, opening.engine_name, device, opened.threads, instances)
    # Opening the artifact may have imported torch.
    limit = opened.production or opening.threads is not None
    settle_threads(opened.threads, limit, opened.production)
    if device.type == "cpu":
        warn_of_other_bits(opened, artifact, target)
    record = manifest.targets[target]
    windows = all(record.candidates[engine].windows for engine in opened.engines(target))
    origin = opened.origin(target, opening.engine_name or record.choice())
    return OpenedHere(artifact, origin, windows)


def choose(opened: Opened, device: torch.device, wanted: str | None) -> str:
    """Choose the target to run: `wanted` if it is given, else the best one for this host.

    Verified targets are preferred. Raises LoadError or TargetError if there is no such target, or
    if it does not run on the device.
    """
    targets = opened.bundle.manifest.targets
    if wanted is None:
        usable = {target: record for target, record in targets.items() if record.chosen}
        verified = {name: record for name, record in usable.items() if record.status == "verified"}
        try:
            best = best_target(verified, str(device))
            if best is not None:
                return _prefer_lower_level(best, verified)
            return _prefer_lower_level(choose_target(usable, str(device)), usable)
        except TargetError as error:
            raise TargetError(f"{error}{withheld(opened)}") from None
    parsed = Target.parse(wanted)
    target = str(parsed)
    if target not in targets:
        known = ", ".join(targets) or "none"
        raise LoadError(
            f"{opened.bundle.manifest.name} has no target {target}; it has: {known}"
            f"{withheld(opened)}",
            code="load-target",
        )
    check_host_runs(parsed)
    if device.type != parsed.torch_device:
        raise LoadError(
            f"target {target} does not run on device {str(device)!r}", code="load-target"
        )
    return target


def _prefer_lower_level(best: str, usable: Mapping[str, TargetRecord]) -> str:
    """Return a CPU level below `best` that was as fast in the same race, else `best` itself.

    A lower level gives the same bits on more hosts. It is as fast if the ratio of the times, as a
    geometric mean over the row counts, is below `_AS_FAST`. `usable`: the records to choose from.
    """
    highest = _median_times(usable[best])
    for target in usable[best].raced_with:
        times = _median_times(usable[target]) if target in usable else {}
        if times and times.keys() == highest.keys():
            logarithms = [math.log(times[case] / highest[case]) for case in times]
            if math.fsum(logarithms) / len(logarithms) < math.log(_AS_FAST):
                return target
    return best


def _median_times(record: TargetRecord) -> dict[str, float]:
    """Return by case of the benchmark: the median time, in µs, of the engine that runs the case."""
    return {
        case: record.candidates[record.engine_at(case)].benchmark[case].median_us
        for case in record.candidates[str(record.chosen)].benchmark
    }


def find_torchless_engine(record: TargetRecord, statuses: Sequence[str] = ("valid",)) -> str | None:
    """Return the engine of an artifact of this target that runs without torch; None: there is none.

    `statuses`: the statuses that the artifact may have. A chosen artifact is preferred.
    """
    order = dict.fromkeys((*record.engines(), *record.candidates))
    for engine in order:
        candidate = record.candidates[engine]
        if engine in WITHOUT_TORCH and candidate.status in statuses and candidate.files:
            return engine
    return None


def why_torch_is_needed(manifest: Manifest) -> str | None:
    """Return why a version does not run on a CPU without torch, as a message; None if it does."""
    verified = {
        target: record
        for target, record in manifest.targets.items()
        if target.startswith("cpu/") and record.status == "verified"
    }
    if any(find_torchless_engine(record) for record in verified.values()):
        return None
    engines = [f"{target} has {', '.join(record.engines())}" for target, record in verified.items()]
    found = "; ".join(engines) or "no CPU target is verified"
    return (
        f"{manifest.name} runs on torch ({found}): "
        f"install it (pip install torch), or build the version with {WITHOUT_TORCH[0]} among its "
        "engines"
    )


def _keep_targets_without_torch(opened: Opened, device: torch.device) -> Opened:
    """Return the version with only the targets that may run on `device` without torch.

    For each, an artifact that runs without torch is chosen. On a GPU it may still wait for the
    validation at its first use. Raises LoadError if no CPU target is left.
    """
    manifest = opened.bundle.manifest
    statuses: tuple[str, ...] = ("valid",)
    if device.type != "cpu":
        statuses += WAITING
    elif reason := why_torch_is_needed(manifest):
        raise LoadError(reason, code="load-without-torch")
    targets, left_out = {}, dict(opened.withheld)
    for target, record in manifest.targets.items():
        engine = find_torchless_engine(record, statuses)
        if engine and not set(record.engines()) <= set(WITHOUT_TORCH):
            record = replace(record, chosen=engine, below=[])
        if engine or device.type != "cpu":  # without an engine: refused later, with its name
            targets[target] = record
        elif target.startswith("cpu/"):
            left_out[target] = "runs on torch"
            if find_torchless_engine(record, WAITING) is not None:
                reason = f"is {record.status}: its first use, with torch, has to validate it"
                left_out[target] = reason
    reduced = replace(manifest, targets=targets)
    return replace(opened, bundle=replace(opened.bundle, manifest=reduced), withheld=left_out)


def _require_no_torch(opened: Opened, target: str) -> None:
    """Raise LoadError if an artifact for a GPU needs torch, and not only the driver."""
    needs = [engine for engine in opened.engines(target) if engine not in WITHOUT_TORCH]
    if needs:
        raise LoadError(
            f"{opened.label}: {', '.join(needs)} for {target} runs on torch, and no torch that is "
            "built for GPUs is here: install it, or build the version with lanes among its engines",
            code="load-without-torch",
        )


def withheld(opened: Opened) -> str:
    """Return the end of an error message: the targets that may not be used, each with its reason.

    It begins with "; ", and is empty if there is no such target.
    """
    return "".join(f"; {target} {why}" for target, why in sorted(opened.withheld.items()))


def _require_engine(opened: Opened, target: str, wanted: str | None) -> None:
    """Raise LoadError unless the target has an artifact that may be opened.

    `wanted`: the engine asked for; None: the chosen one. In production the target must be verified,
    and the artifact valid.
    """
    name, record = opened.bundle.manifest.name, opened.bundle.manifest.targets[target]
    if opened.production and record.status != "verified":
        raise LoadError(
            f"{name} is {record.status} on {target}: production runs only what was verified there",
            code="load-not-verified",
        )
    chosen = record.chosen if wanted is None else wanted  # the engine
    if chosen is None:
        reasons = [f"{engine}: {tried.reason}" for engine, tried in record.candidates.items()]
        raise LoadError(
            f"{name} has no valid artifact on {target}: {'; '.join(reasons)}",
            code="load-not-verified",
        )
    if chosen not in record.candidates:
        known = ", ".join(record.candidates)
        raise LoadError(
            f"{name} has no artifact of {chosen!r} on {target}; it has: {known}", code="load-target"
        )
    candidate = record.candidates[chosen]
    if opened.production and candidate.status != "valid":
        raise LoadError(
            f"{name}: the {chosen} artifact for {target} is {candidate.status}: {candidate.reason}",
            code="load-not-verified",
        )


def _build_missing_target(
    opened: Opened, device: torch.device, wanted: str | None, builder: Builder
) -> Opened:
    """Return the version with a verified target for this host.

    If it has none, `builder` builds one now, which is attached to the bundle. `wanted`: the target
    asked for, or None.
    """
    targets = opened.bundle.manifest.targets
    verified = [name for name, record in targets.items() if record.status == "verified"]
    if wanted is None:
        if best_target(verified, str(device)):
            return opened
        target = Target.parse("cpu") if device.type == "cpu" else gpu_target(device.index or 0)
    else:
        target = Target.parse(wanted)
        check_host_runs(target)
    # `choose` refuses a wanted target of another device.
    if str(target) in verified or target.torch_device != device.type:
        return opened
    return replace(opened, bundle=attach(opened.bundle, [builder(opened.bundle, target)]))
