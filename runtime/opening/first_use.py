"""Validate an artifact at its first use, if it was built on a host without a device of its kind.

It is validated before it runs, in a separate process. The result stays in this host's cache, for
this bundle and exactly this kind of device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engines.kinds import cpu_flags
from engines.target import gpu_target
from registry.bundle import TargetRecord
from runtime.errors import LoadError
from runtime.opening.host_notes import find_out_once
from soa.memory import torch_drives_gpus
from soa.text import logger

if TYPE_CHECKING:
    import torch

    from runtime.opening.request import Opened, Prover

log = logger("soa-pipeline")

WAITING = ("compiles", "emulated")
"""Statuses of targets that wait for such a validation."""


def validate_at_first_use(
    opened: Opened, target: str, device: torch.device, prover: Prover
) -> Opened:
    """Validate `target` if it waits for that, and return `opened` with the target as verified.

    Raises LoadError with the deviations if the artifact gives wrong answers.
    """
    record = opened.bundle.manifest.targets[target]
    if record.status not in WAITING:
        return opened
    for engine in opened.engines(target):
        if why := _why_refused(opened, target, engine, device, prover):
            raise LoadError(
                f"{opened.label}: {engine} for {target} was {record.status} when it was built, and "
                f"it is refused on this device: {why}",
                code="load-not-verified",
            )
    targets = {**opened.bundle.manifest.targets, target: _mark_verified(record)}
    manifest = replace(opened.bundle.manifest, targets=targets)
    return replace(opened, bundle=replace(opened.bundle, manifest=manifest))


def _mark_verified(record: TargetRecord) -> TargetRecord:
    """The record with its target as verified: the artifacts that run, which were validated, and all
    that wait are valid."""
    candidates = dict(record.candidates)
    for name, candidate in record.candidates.items():
        if candidate.status in WAITING or name in record.engines():
            candidates[name] = replace(candidate, status="valid")
    return replace(record, status="verified", candidates=candidates)


def _why_refused(
    opened: Opened, target: str, engine: str, device: torch.device, prover: Prover
) -> str | None:
    """Why the artifact is refused here; None if it is valid."""

    def validated() -> str | None:
        """Validate the artifact now, which may take minutes."""
        log.info("%s: %s for %s is validated here at its first use", opened.label, engine, target)
        return prover(opened, target, engine)

    return find_out_once("first-use", opened, target, engine, _device_kind(device), validated)


def _device_kind(device: torch.device) -> str:
    """The kind of device for which a verdict counts."""
    if device.type == "cpu":
        return " ".join(sorted(cpu_flags()))
    if not torch_drives_gpus():
        return f"{gpu_target(device.index or 0)} by its driver"
    import torch

    return f"{torch.cuda.get_device_name(device)} {torch.version.cuda} {torch.version.hip}"
