"""Load: from a reference to a session on the device where the data is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypedDict, Unpack, overload

import torch

from engines.base import Executable
from engines.errors import TargetError
from engines.forks import require_openmp
from engines.target import Target, check_host_runs
from registry.annex import open_folder
from registry.bundle import Bundle
from registry.errors import SignatureError
from registry.manifest import Manifest
from registry.promoted import read_promoted
from registry.reference import parse_ref
from registry.store import Registry
from registry.version import Version
from runtime.checked import CheckedSession
from runtime.choice import Builder, choose, choose_engine, completed, waiting
from runtime.compare import Tolerance
from runtime.devices import MultiDeviceSession
from runtime.errors import LoadError
from runtime.live import LiveSession
from runtime.lookup import (
    MAX_AGE_S,
    POLICIES,
    Found,
    Name,
    Policy,
    find_version,
    promoted_annexes,
)
from runtime.pinned_open import open_pinned
from runtime.ranged import RangedExecutable
from runtime.session import Origin, Session
from runtime.tf32 import settle_tf32
from runtime.trust import require_trusted
from soa.signature import Signature

Mode = Literal["test", "production"]


class Options(TypedDict, total=False):
    """The options of `load` that do not change what it returns."""

    mode: Mode
    registry: Registry | str | None
    lookup: Policy
    max_age_s: float
    trusted_keys: Sequence[str | Path] | None
    engine_name: str | None
    threads: int | None
    instances: int | None


@overload
def load(
    ref: str | Path,
    *,
    live: Literal[True],
    device: str | torch.device = ...,
    target: str | None = ...,
    builder: Builder | None = ...,
    **options: Unpack[Options],
) -> LiveSession: ...


@overload
def load(  # type: ignore[overload-overlap]  # "auto" is a str too, with another result
    ref: str | Path,
    *,
    device: Literal["auto"],
    live: Literal[False] = ...,
    builder: Builder | None = ...,
    **options: Unpack[Options],
) -> MultiDeviceSession: ...


@overload
def load(
    ref: str | Path,
    *,
    device: str | torch.device = ...,
    live: Literal[False] = ...,
    target: str | None = ...,
    builder: Builder | None = ...,
    **options: Unpack[Options],
) -> Session: ...


def load(
    ref: str | Path,
    *,
    live: bool = False,
    device: str | torch.device = "cpu",
    target: str | None = None,
    builder: Builder | None = None,
    **options: Unpack[Options],
) -> Session | MultiDeviceSession | LiveSession:
    """Open a version for running: `name@alias`, `name/3`, `name`, or the folder of a bundle.

    `device`: "cpu", "cuda", "cuda:1" (ROCm too is "cuda"), or "auto" for a session that runs
    wherever its data is and deploys the model on a device at the first event there.

    `mode="production"` takes only what a gate let into production (the version, or a folder that
    `pipeline pull` made of it), runs without any check beyond those made when memory is bound,
    and sets torch to `threads` threads in this process (1 by default: the caller's thread does the
    work). `mode="test"` takes anything and returns a `CheckedSession`, which runs every event on
    the reference too; it leaves torch's threads alone.

    `lookup` says who is asked what a name means: "fresh", "prefer-cache" (with `max_age_s`, 300 by
    default) or "offline", see runtime/lookup.py; `session.origin.lookup` says how it went.
    `live=True` gives a `LiveSession`, which moves to what the name means later.

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
    _check(options, device, target)
    wanted = _Wanted(ref, device, target, builder, options)
    name = _name(ref, wanted.mode, options)
    if name is None:
        if live:
            raise LoadError(f"{ref} is a folder, which means the same for ever: load it as it is")
        return _folder_session(wanted)
    if not live:
        return _session(name, *name.open(name.find()), wanted)
    if name.ref.version is not None:
        raise LoadError(
            f"{ref} means the same for ever: to follow what is promoted, write "
            f"{name.ref.name}@production"
        )
    return LiveSession(name, lambda found, bundle: _session(name, found, bundle, wanted))


def _check(options: Options, device: str | torch.device, target: str | None) -> None:
    mode = options.get("mode", "production")
    if mode not in ("test", "production"):
        raise LoadError(f"mode {mode!r} is neither 'test' nor 'production'")
    policy = options.get("lookup", "fresh")
    if policy not in POLICIES:
        raise LoadError(f"lookup {policy!r}: use one of {', '.join(map(repr, POLICIES))}")
    for name, count in (
        ("threads", options.get("threads")),
        ("instances", options.get("instances")),
    ):
        if count is not None and count < 1:
            raise LoadError(f"{name}={count}: at least 1 is needed")
    if device == "auto" and target is not None:
        raise LoadError(f"target {target!r} with device 'auto': each device has its own target")
    if device != "auto":
        _device(device)


def _name(ref: str | Path, mode: Mode, options: Options) -> Name | None:
    """What is to be looked up; None for a folder."""
    parsed = ref if isinstance(ref, Path) else parse_ref(ref)
    if isinstance(parsed, Path):
        return None
    registry = options.get("registry")
    store = registry if isinstance(registry, Registry) else Registry(registry)
    return Name(
        parsed, store, mode, options.get("lookup", "fresh"), options.get("max_age_s", MAX_AGE_S)
    )


@dataclass(frozen=True)
class _Wanted:
    """How a version is to be opened."""

    ref: str | Path
    place: str | torch.device
    """A device, or "auto"."""
    target: str | None
    builder: Builder | None
    options: Options

    @property
    def mode(self) -> Mode:
        return self.options.get("mode", "production")


def _session(
    name: Name, found: Found, bundle: Bundle, wanted: _Wanted
) -> Session | MultiDeviceSession:
    """A session of what was found, once it has passed the gates of its mode."""
    unsigned = frozenset[str]()
    if wanted.mode == "production":
        try:
            require_promoted(wanted.ref, bundle, found.version)
            unsigned = require_trusted(
                bundle,
                found.resolution.signers,
                wanted.options.get("trusted_keys"),
                partial(name.store.require_signature, found.version, fetch=name.may_fetch(found)),
            )
        except (LoadError, SignatureError):
            if found.lookup.asked:
                name.forget()
            raise
    name.keep(found)
    return _on_devices(bundle, found, wanted, unsigned)


def _folder_session(wanted: _Wanted) -> Session | MultiDeviceSession:
    production = wanted.mode == "production"
    bundle, _ = open_bundle(wanted.ref, promoted=production)
    unsigned = frozenset[str]()
    if production:
        require_promoted(wanted.ref, bundle, None)
        unsigned = require_trusted(bundle, (), wanted.options.get("trusted_keys"))
    return _on_devices(bundle, None, wanted, unsigned)


def _on_devices(
    bundle: Bundle, found: Found | None, wanted: _Wanted, unsigned: frozenset[str]
) -> Session | MultiDeviceSession:
    """`unsigned`: targets that are not to be run, for want of a signature."""
    settings, options = bundle.manifest.session, wanted.options
    given, instances = options.get("threads"), options.get("instances")
    threads = settings.threads if given is None else given
    require_openmp(threads)
    if wanted.mode == "production":
        _quiet_torch(threads)
    elif given is not None:
        torch.set_num_threads(given)

    def open_on(device: torch.device) -> Session:
        return _open(
            bundle,
            found,
            device,
            wanted,
            unsigned,
            threads,
            settings.instances if instances is None else instances,
        )

    if wanted.place != "auto":
        return open_on(_device(wanted.place))
    return MultiDeviceSession(Signature.from_dict(bundle.manifest.signature), open_on)


def _open(
    bundle: Bundle,
    found: Found | None,
    device: torch.device,
    wanted: _Wanted,
    unsigned: frozenset[str],
    threads: int,
    instances: int | None,
) -> Session:
    if wanted.builder is not None:
        bundle = completed(bundle, device, wanted.target, wanted.builder)
    version = found.version if found else None
    try:
        chosen, record = choose(bundle.manifest, device, wanted.target, unsigned)
    except (LoadError, TargetError) as error:
        raise type(error)(f"{error}{waiting(bundle, version)}") from None
    production, engine_name = wanted.mode == "production", wanted.options.get("engine_name")
    name = choose_engine(bundle, chosen, record, engine_name, production=production)
    if device.type == "cuda":
        settle_tf32(bundle.manifest.capture.precision == "tf32", bundle.manifest.name)
    if engine_name is None:
        executable = open_choice(bundle, chosen, device, threads, instances)
        name = record.choice()
    else:
        executable = open_artifact(bundle, chosen, name, device, threads, instances)
    signature = Signature.from_dict(bundle.manifest.signature)
    number = str(version.number) if version else None
    origin = Origin(
        bundle.manifest.name, number, bundle.digest, chosen, name, found.lookup if found else None
    )
    if production:
        return Session(signature, executable, device, origin)
    reference = open_pinned(bundle, "exported", [bundle.manifest.program], device)
    return CheckedSession(
        signature, executable, reference, tolerances_of(bundle.manifest), device, origin
    )


def _quiet_torch(threads: int) -> None:
    """The caller's thread does the work: torch starts none of its own beyond `threads`."""
    torch.set_num_threads(threads)
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
    version = find_version(store, parsed)
    return store.open(version, annexes=promoted_annexes(version) if promoted else None), version


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
