"""Load: from a reference to a session on the device where the data is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from engines.engine import Executable, engine
from engines.target import Target, check_host_runs, choose_target
from registry.bundle import Bundle
from registry.errors import NotFoundError
from registry.manifest import Manifest, TargetRecord
from registry.promoted import read_promoted
from registry.reference import parse_ref
from registry.store import Registry
from registry.version import Version
from runtime.checked import CheckedSession
from runtime.compare import Tolerance
from runtime.errors import LoadError
from runtime.session import Origin, Session
from soa.signature import Signature

Mode = Literal["test", "production"]


def load(
    ref: str | Path,
    *,
    device: str | torch.device = "cpu",
    mode: Mode = "production",
    registry: Registry | str | None = None,
    target: str | None = None,
    engine_name: str | None = None,
    threads: int | None = None,
) -> Session:
    """Open a version for running: `name@alias`, `name/3`, `name`, or the folder of a bundle.

    `mode="production"` takes only what a gate let into production (the version, or a folder that
    `pipeline pull` made of it), runs without any check beyond those made when memory is bound,
    and sets torch to `threads` threads in this process (1 by default: the caller's thread does the
    work). `mode="test"` takes anything and returns a `CheckedSession`, which runs every event on
    the reference too; it leaves torch's threads alone.

    `target` and `engine_name` override the best target of this host and the engine that was chosen
    for it. Every file's digest is checked before anything in the bundle is used.

    Raises LoadError, or the typed error of what went wrong: registry, bundle, target or engine.
    """
    if mode not in ("test", "production"):
        raise LoadError(f"mode {mode!r} is neither 'test' nor 'production'")
    device = _device(device)
    bundle, version = open_bundle(ref, registry)
    if mode == "production":
        _require_promoted(ref, bundle, version)
    chosen, record = _target(bundle.manifest, device, target)
    name = _engine(bundle, chosen, record, engine_name, mode)
    executable = open_artifact(bundle, chosen, name, device, threads or 1)
    signature = Signature.from_dict(bundle.manifest.signature)
    origin = Origin(
        bundle.manifest.name, str(version.number) if version else None, bundle.digest, chosen, name
    )
    if mode == "production":
        torch.set_num_threads(threads or 1)
        return Session(signature, executable, device, origin)
    if threads is not None:
        torch.set_num_threads(threads)
    reference = engine("exported").open(bundle.file(bundle.manifest.program), device)
    return CheckedSession(
        signature, executable, reference, tolerances_of(bundle.manifest), device, origin
    )


def open_bundle(
    ref: str | Path, registry: Registry | str | None = None
) -> tuple[Bundle, Version | None]:
    """The bundle behind a reference, digests checked, and its version if a registry has it."""
    parsed = ref if isinstance(ref, Path) else parse_ref(ref)
    if isinstance(parsed, Path):
        return Bundle.open(parsed), None
    store = registry if isinstance(registry, Registry) else Registry(registry)
    try:
        version = store.find(parsed)
    except NotFoundError as error:
        if Path(ref).is_dir():
            raise LoadError(f"{error}; for the folder of that name write ./{ref}") from None
        raise
    return store.open(version), version


def open_artifact(
    bundle: Bundle, target: str, engine_name: str, device: torch.device, threads: int = 1
) -> Executable:
    """Open one candidate of a bundle, whatever its verdict; the caller has judged it."""
    candidate = bundle.manifest.targets[target].candidates[engine_name]
    if not candidate.files:
        raise LoadError(f"{bundle.path}: {engine_name} made no artifact for {target}")
    check_host_runs(Target.parse(target))
    return engine(engine_name).open(bundle.file(candidate.files[0]), device, threads)


def tolerances_of(manifest: Manifest) -> dict[str, Tolerance]:
    """The tolerances a version was validated with, by output."""
    return {
        name: Tolerance(t.atol, t.rtol, t.max_outside) for name, t in manifest.tolerances.items()
    }


def _require_promoted(ref: str | Path, bundle: Bundle, version: Version | None) -> None:
    if version is not None:
        if version.promotion("production") is None:
            raise LoadError(
                f"{version.ref} was never promoted to production: run "
                f"`pipeline promote {version.ref} --to production`, or load it with mode='test'"
            )
        return
    record = read_promoted(bundle.path)
    if record is None:
        raise LoadError(
            f"{ref} is a folder that no promotion vouches for: make one with "
            "`pipeline pull NAME@production DIR`, or load it with mode='test'"
        )
    if record.digest != bundle.digest:
        raise LoadError(
            f"{ref} is not the bundle that was promoted as {record.ref}: its digest is "
            f"{bundle.digest[:12]}, promoted was {record.digest[:12]}"
        )


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise LoadError(f"device {device!r}: use 'cpu', 'cuda' or 'cuda:1' (ROCm too is 'cuda')")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise LoadError(f"device {str(found)!r}: torch sees {torch.cuda.device_count()} GPUs here")
    return found


def _target(
    manifest: Manifest, device: torch.device, wanted: str | None
) -> tuple[str, TargetRecord]:
    if wanted is not None:
        name = str(Target.parse(wanted))
        if name not in manifest.targets:
            have = ", ".join(manifest.targets) or "none"
            raise LoadError(f"{manifest.name} has no target {name}; it has: {have}")
        check_host_runs(Target.parse(name))
        if (device.type == "cpu") != name.startswith("cpu/"):
            raise LoadError(f"target {name} does not run on device {str(device)!r}")
        return name, manifest.targets[name]
    usable = [name for name, record in manifest.targets.items() if record.chosen]
    name = choose_target(usable, str(device))
    return name, manifest.targets[name]


def _engine(
    bundle: Bundle, target: str, record: TargetRecord, wanted: str | None, mode: Mode
) -> str:
    if mode == "production" and record.status != "verified":
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
    if mode == "production" and candidate.status != "valid":
        raise LoadError(
            f"{bundle.manifest.name}: the {name} artifact for {target} is {candidate.status}: "
            f"{candidate.reason}"
        )
    return name
