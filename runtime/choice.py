"""Choice: which of a version's targets and artifacts a session runs, and why none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

import torch

from engines.errors import TargetError
from engines.target import Target, check_host_runs, choose_target, gpu_target
from registry.annex import Annex, attach
from registry.bundle import Bundle
from registry.manifest import Manifest, TargetRecord
from registry.version import Version
from runtime.errors import LoadError

Builder = Callable[[Bundle, Target], Annex]
"""Builds a bundle's program for a target, proven against the bundle's reference; or raises."""


def choose(
    manifest: Manifest, device: torch.device, wanted: str | None, unsigned: Collection[str]
) -> tuple[str, TargetRecord]:
    """The target `wanted`, or the best of this host; none of those that are `unsigned`."""
    if wanted is not None:
        name = str(Target.parse(wanted))
        if name not in manifest.targets:
            have = ", ".join(manifest.targets) or "none"
            raise LoadError(f"{manifest.name} has no target {name}; it has: {have}")
        if name in unsigned:
            raise LoadError(
                f"{manifest.name}: {name} was built after the version was signed, and no signature "
                "covers it: sign a version that has it, or load another target"
            )
        check_host_runs(Target.parse(name))
        if (device.type == "cpu") != name.startswith("cpu/"):
            raise LoadError(f"target {name} does not run on device {str(device)!r}")
        return name, manifest.targets[name]
    usable = [
        name for name, record in manifest.targets.items() if record.chosen and name not in unsigned
    ]
    name = choose_target(usable, str(device))
    return name, manifest.targets[name]


def choose_engine(
    bundle: Bundle, target: str, record: TargetRecord, wanted: str | None, *, production: bool
) -> str:
    """The engine `wanted`, or the one chosen for the target; in production, only what is valid."""
    if production and record.status != "verified":
        raise LoadError(
            f"{bundle.manifest.name} is {record.status} on {target}: production runs only what "
            "was verified there"
        )
    name = wanted or record.chosen
    if name is None:
        reasons = "; ".join(f"{e}: {c.reason}" for e, c in record.candidates.items())
        raise LoadError(f"{bundle.manifest.name} has no valid artifact on {target}: {reasons}")
    if name not in record.candidates:
        have = ", ".join(record.candidates)
        raise LoadError(
            f"{bundle.manifest.name} has no {name} artifact on {target}; it has: {have}"
        )
    candidate = record.candidates[name]
    if production and candidate.status != "valid":
        raise LoadError(
            f"{bundle.manifest.name}: the {name} artifact for {target} is {candidate.status}: "
            f"{candidate.reason}"
        )
    return name


def completed(bundle: Bundle, device: torch.device, wanted: str | None, builder: Builder) -> Bundle:
    """With a verified artifact for this host: its own, or one that is built now."""
    targets = bundle.manifest.targets
    verified = [name for name, record in targets.items() if record.status == "verified"]
    if wanted is None:
        with suppress(TargetError):
            choose_target(verified, str(device))
            return bundle
        target = Target.parse("cpu") if device.type == "cpu" else gpu_target(device.index or 0)
    else:
        target = Target.parse(wanted)
        check_host_runs(target)
    # A wanted target of another device is refused in its place.
    if str(target) in verified or target.torch_device != device.type:
        return bundle
    return attach(bundle, [builder(bundle, target)])


def waiting(bundle: Bundle, version: Version | None) -> str:
    """What was built for a version and no promotion has let pass yet."""
    built = sorted(version.annexes.keys() - bundle.annexes.keys()) if version else []
    if version is None or not built:
        return ""
    return (
        f"; built since it was promoted: {', '.join(built)}: run `pipeline promote {version.ref} "
        "--to production` on such a host to let it in"
    )
