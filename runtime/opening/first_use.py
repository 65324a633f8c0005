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
"""The statuses of targets and artifacts that wait for this validation."""


def validate_here(opened: Opened, target: str, device: torch.device, prover: Prover) -> Opened:
    """Validate `target` here if it waits for that; return `opened` with the target as verified.

    A target that does not wait is not validated, and `opened` itself is returned. Raises LoadError
    with the deviations if an artifact gives wrong answers.
    """
    record = opened.bundle.manifest.targets[target]
    if record.status not in WAITING:
        return opened
    for engine in opened.engines(target):
        if reason := _find_refusal(opened, target, engine, device, prover):
            raise LoadError(
                f"{opened.label}: {engine} for {target} was {record.status} when it was built, and "
                f"it is refused on this device: {reason}",
                code="load-not-verified",
            )
    targets = {**opened.bundle.manifest.targets, target: _mark_verified(record)}
    manifest = replace(opened.bundle.manifest, targets=targets)
    return replace(opened, bundle=replace(opened.bundle, manifest=manifest))


def _mark_verified(record: TargetRecord) -> TargetRecord:
    """Return the record with the status "verified".

    Its artifacts that a session runs were just validated. They become valid, and so do all others
    that wait.
    """
    candidates = dict(record.candidates)
    for name, candidate in record.candidates.items():
        if candidate.status in WAITING or name in record.engines():
            candidates[name] = replace(candidate, status="valid")
    return replace(record, status="verified", candidates=candidates)


def _find_refusal(
    opened: Opened, target: str, engine: str, device: torch.device, prover: Prover
) -> str | None:
    """Return why the artifact is refused on this device, or None if it is valid.

    The artifact is validated only if this host has no record of it.
    """

    def validate() -> str | None:
        """Validate the artifact now, which may take minutes."""
        log.info("%s: %s for %s is validated here at its first use", opened.label, engine, target)
        return prover(opened, target, engine)

    return find_out_once("first-use", opened, target, engine, _describe_device(device), validate)


def _describe_device(device: torch.device) -> str:
    """Describe the kind of device for which a validation counts, for example by the CPU's flags."""
    if device.type == "cpu":
        return " ".join(sorted(cpu_flags()))
    if not torch_drives_gpus():
        return f"{gpu_target(device.index or 0)} by its driver"
    import torch

    return f"{torch.cuda.get_device_name(device)} {torch.version.cuda} {torch.version.hip}"
