"""Load: from a reference to a session on the device where the data is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

import torch

from engines.engine import Executable
from engines.errors import TargetError
from engines.target import Target, check_host_runs, choose_target, gpu_target
from registry.annex import Annex, attach, open_folder
from registry.bundle import Bundle
from registry.errors import NotFoundError
from registry.manifest import Manifest, TargetRecord
from registry.promoted import read_promoted
from registry.reference import parse_ref
from registry.store import Registry
from registry.version import Version
from runtime.checked import CheckedSession
from runtime.compare import Tolerance
from runtime.devices import MultiDeviceSession
from runtime.errors import LoadError
from runtime.pinned_open import open_pinned
from runtime.ranged import RangedExecutable
from runtime.session import Origin, Session
from runtime.tf32 import settle_tf32
from runtime.trust import require_trusted
from soa.signature import Signature

Mode = Literal["test", "production"]
Builder = Callable[[Bundle, Target], Annex]
"""Builds a bundle's program for a target, proven against the bundle's reference; or raises."""


@overload
def load(  # type: ignore[overload-overlap]  # "auto" is a str too, with another result
    ref: str | Path,
    *,
    device: Literal["auto"],
    mode: Mode = ...,
    registry: Registry | str | None = ...,
    trusted_keys: Sequence[str | Path] | None = ...,
    engine_name: str | None = ...,
    threads: int | None = ...,
    instances: int | None = ...,
    builder: Builder | None = ...,
) -> MultiDeviceSession: ...


@overload
def load(
    ref: str | Path,
    *,
    device: str | torch.device = ...,
    mode: Mode = ...,
    registry: Registry | str | None = ...,
    trusted_keys: Sequence[str | Path] | None = ...,
    target: str | None = ...,
    engine_name: str | None = ...,
    threads: int | None = ...,
    instances: int | None = ...,
    builder: Builder | None = ...,
) -> Session: ...


def load(
    ref: str | Path,
    *,
    device: str | torch.device = "cpu",
    mode: Mode = "production",
    registry: Registry | str | None = None,
    trusted_keys: Sequence[str | Path] | None = None,
    target: str | None = None,
    engine_name: str | None = None,
    threads: int | None = None,
    instances: int | None = None,
    builder: Builder | None = None,
) -> Session | MultiDeviceSession:
    """Open a version for running: `name@alias`, `name/3`, `name`, or the folder of a bundle.

    `device`: "cpu", "cuda", "cuda:1" (ROCm too is "cuda"), or "auto" for a session that runs
    wherever its data is and deploys the model on a device at the first event there.

    `mode="production"` takes only what a gate let into production (the version, or a folder that
    `pipeline pull` made of it), runs without any check beyond those made when memory is bound,
    and sets torch to `threads` threads in this process (1 by default: the caller's thread does the
    work). `mode="test"` takes anything and returns a `CheckedSession`, which runs every event on
    the reference too; it leaves torch's threads alone.

    `trusted_keys`: files of public keys, or folders of them; by default those that the variable
    PIPELINE_TRUSTED_KEYS names. Where there are any, or the registry's policy names some,
    production takes only what one of them has signed.

    `target` and `engine_name` override the best target of this host and the engine that was chosen
    for it. `threads` and `instances` (how many runs there may be at one moment) override what the
    version's config says under `session`. Every file's digest is checked before anything in the
    bundle is used. Of what was built for the version later, production takes what a promotion let
    pass.

    `builder` is asked for an artifact where the version holds no verified one for this host.

    Raises LoadError, or the typed error of what went wrong: registry, bundle, target or engine.
    """
    if mode not in ("test", "production"):
        raise LoadError(f"mode {mode!r} is neither 'test' nor 'production'")
    for name, count in (("threads", threads), ("instances", instances)):
        if count is not None and count < 1:
            raise LoadError(f"{name}={count}: at least 1 is needed")
    auto = device == "auto"
    if auto and target is not None:
        raise LoadError(f"target {target!r} with device 'auto': each device has its own target")
    where = torch.device("cpu") if auto else _device(device)
    bundle, version = open_bundle(ref, registry, promoted=mode == "production")
    unsigned = frozenset[str]()
    if mode == "production":
        require_promoted(ref, bundle, version)
        unsigned = require_trusted(bundle, version, registry, trusted_keys)
    settings = bundle.manifest.session
    wanted = _Wanted(
        mode,
        target,
        engine_name,
        settings.threads if threads is None else threads,
        settings.instances if instances is None else instances,
        builder,
        unsigned,
    )
    if mode == "production":
        _quiet_torch(wanted.threads)
    elif threads is not None:
        torch.set_num_threads(threads)
    if not auto:
        return _open(bundle, version, where, wanted)
    return MultiDeviceSession(
        Signature.from_dict(bundle.manifest.signature),
        lambda found: _open(bundle, version, found, wanted),
    )


@dataclass(frozen=True)
class _Wanted:
    """How a version is to be opened, on whichever device."""

    mode: Mode
    target: str | None
    engine_name: str | None
    threads: int
    instances: int | None
    builder: Builder | None
    unsigned: frozenset[str]
    """Targets that are not to be run, for want of a signature."""


def _open(
    bundle: Bundle, version: Version | None, device: torch.device, wanted: _Wanted
) -> Session:
    if wanted.builder is not None:
        bundle = _completed(bundle, device, wanted.target, wanted.builder)
    try:
        chosen, record = _target(bundle.manifest, device, wanted)
    except (LoadError, TargetError) as error:
        raise type(error)(f"{error}{_waiting(bundle, version)}") from None
    name = _engine(bundle, chosen, record, wanted.engine_name, wanted.mode)
    if device.type == "cuda":
        settle_tf32(bundle.manifest.capture.precision == "tf32", bundle.manifest.name)
    if wanted.engine_name is None:
        executable = open_choice(bundle, chosen, device, wanted.threads, wanted.instances)
        name = record.choice()
    else:
        executable = open_artifact(bundle, chosen, name, device, wanted.threads, wanted.instances)
    signature = Signature.from_dict(bundle.manifest.signature)
    number = str(version.number) if version else None
    origin = Origin(bundle.manifest.name, number, bundle.digest, chosen, name)
    if wanted.mode == "production":
        return Session(signature, executable, device, origin)
    reference = open_pinned(bundle, "exported", [bundle.manifest.program], device)
    return CheckedSession(
        signature, executable, reference, tolerances_of(bundle.manifest), device, origin
    )


def _quiet_torch(threads: int) -> None:
    """The caller's thread does the work: torch starts none of its own beyond `threads`.

    And float32 is float32: cuDNN would take TF32 for convolutions by itself.
    """
    torch.set_num_threads(threads)
    # By the older of two switches: after the newer one torch 2.13 exports no model any more.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    if torch.get_num_interop_threads() != 1:
        with suppress(RuntimeError):  # torch takes this setting once, before its first use
            torch.set_num_interop_threads(1)


def open_bundle(
    ref: str | Path, registry: Registry | str | None = None, *, promoted: bool = False
) -> tuple[Bundle, Version | None]:
    """The bundle behind a reference, digests checked, and its version if a registry has it.

    With the targets that were built later: all, or those that were `promoted` to production.
    """
    parsed = ref if isinstance(ref, Path) else parse_ref(ref)
    if isinstance(parsed, Path):
        note = read_promoted(parsed) if promoted and parsed.is_dir() else None
        passed = note.annexes if note else {}
        return open_folder(parsed, only=passed if promoted else None), None
    store = registry if isinstance(registry, Registry) else Registry(registry)
    try:
        version = store.find(parsed)
    except NotFoundError as error:
        if Path(ref).is_dir():
            raise LoadError(f"{error}; for the folder of that name write ./{ref}") from None
        raise
    if not promoted:
        return store.open(version), version
    record = version.promotion("production")
    let_pass = record.annexes if record else {}
    annexes = [t for t, digest in version.annexes.items() if let_pass.get(t) == digest]
    return store.open(version, annexes=annexes), version


def _completed(
    bundle: Bundle, device: torch.device, wanted: str | None, builder: Builder
) -> Bundle:
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


def _waiting(bundle: Bundle, version: Version | None) -> str:
    """What was built for a version and no promotion has let pass yet."""
    built = sorted(version.annexes.keys() - bundle.annexes.keys()) if version else []
    if version is None or not built:
        return ""
    return (
        f"; built since it was promoted: {', '.join(built)}: run `pipeline promote {version.ref} "
        "--to production` on such a host to let it in"
    )


def open_artifact(
    bundle: Bundle,
    target: str,
    engine_name: str,
    device: torch.device,
    threads: int = 1,
    instances: int | None = None,
) -> Executable:
    """Open one candidate of a bundle, whatever its verdict; the caller has judged it."""
    candidate = bundle.manifest.targets[target].candidates[engine_name]
    if not candidate.files:
        raise LoadError(f"{bundle.path}: {engine_name} made no artifact for {target}")
    check_host_runs(Target.parse(target))
    return open_pinned(bundle, engine_name, candidate.files, device, threads, instances)


def open_choice(
    bundle: Bundle,
    target: str,
    device: torch.device,
    threads: int = 1,
    instances: int | None = None,
) -> Executable:
    """Open what was chosen for a target: one artifact, or several that share the row counts."""
    record = bundle.manifest.targets[target]
    opened = {
        name: open_artifact(bundle, target, name, device, threads, instances)
        for name in record.engines()
    }
    if not record.below:
        return opened[str(record.chosen)]
    return RangedExecutable(
        [(each.rows, opened[each.engine]) for each in record.below], opened[str(record.chosen)]
    )


def tolerances_of(manifest: Manifest) -> dict[str, Tolerance]:
    """The tolerances a version was validated with, by output."""
    return {
        name: Tolerance(t.atol, t.rtol, t.max_outside) for name, t in manifest.tolerances.items()
    }


def require_promoted(ref: str | Path, bundle: Bundle, version: Version | None) -> None:
    """Raise LoadError unless a gate let the version, or the bundle of a folder, into production."""
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
        raise LoadError(
            f"device {device!r}: use 'cpu', 'cuda' or 'cuda:1' (ROCm too is 'cuda'), or 'auto'"
        )
    if found.type == "cuda" and found.index is None and torch.cuda.is_available():
        found = torch.device("cuda", torch.cuda.current_device())
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise LoadError(f"device {str(found)!r}: torch sees {torch.cuda.device_count()} GPUs here")
    return found


def _target(manifest: Manifest, device: torch.device, wanted: _Wanted) -> tuple[str, TargetRecord]:
    if wanted.target is not None:
        name = str(Target.parse(wanted.target))
        if name not in manifest.targets:
            have = ", ".join(manifest.targets) or "none"
            raise LoadError(f"{manifest.name} has no target {name}; it has: {have}")
        if name in wanted.unsigned:
            raise LoadError(
                f"{manifest.name}: {name} was built after the version was signed, and no signature "
                "covers it: sign a version that has it, or load another target"
            )
        check_host_runs(Target.parse(name))
        if (device.type == "cpu") != name.startswith("cpu/"):
            raise LoadError(f"target {name} does not run on device {str(device)!r}")
        return name, manifest.targets[name]
    usable = [
        name
        for name, record in manifest.targets.items()
        if record.chosen and name not in wanted.unsigned
    ]
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
