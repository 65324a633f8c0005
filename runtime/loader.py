"""Sessions: what came along the route to an artifact, on the devices where the data is."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

import torch

from engines.processes import require_openmp
from engines.target import Target
from registry.bundle import Manifest
from runtime.checked import CheckedSession, Tolerance
from runtime.devices import LiveSession, MultiDeviceSession
from runtime.errors import LoadError
from runtime.opening import (
    Mode,
    Opened,
    Opening,
    Options,
    name_of,
    open_artifact,
    open_here,
    open_program,
    open_version,
)
from runtime.session import Origin, Session
from soa.options import known_options
from soa.signature import Signature

AUTO = "auto"


@known_options(Opening)
def load(
    ref: str | Path,
    *,
    device: str | torch.device = "cpu",
    mode: Mode = "production",
    **options: Unpack[Options],
) -> Session:
    """A session on one device of this host; the options are those of `Opening`.

    `pipeline.load` has more ways to run, and comes here for this one.
    """
    opening = Opening(ref, mode=mode, **options)
    where = device_here(device)
    return session_on(open_version(opening), opening, where)


def load_everywhere(opening: Opening) -> MultiDeviceSession:
    """A session that opens the artifact on a device at the first event there."""
    _one_target_each(opening)
    return _everywhere(open_version(opening), opening)


def load_live(opening: Opening, device: str | torch.device) -> LiveSession:
    """A session that moves to what the name means later."""
    name = name_of(opening)
    if name is None:
        raise LoadError(
            f"{opening.ref} is a folder, which means the same for ever: load it as it is"
        )
    if name.ref.version is not None:
        raise LoadError(
            f"{opening.ref} means the same for ever: to follow what is promoted, write "
            f"{name.ref.name}@production"
        )
    if device == AUTO:
        _one_target_each(opening)
        return LiveSession(name, lambda opened: _everywhere(opened, opening))
    where = device_here(device)
    return LiveSession(name, lambda opened: session_on(opened, opening, where))


def session_on(opened: Opened, opening: Opening, device: torch.device) -> Session:
    """Production leaves the work to the caller's thread; test mode compares every event."""
    _settle_threads(opened, opening)
    return _session(opened, opening, device)


def _session(opened: Opened, opening: Opening, device: torch.device) -> Session:
    manifest = opened.bundle.manifest
    executable, target, engine = open_here(opened, opening, device)
    number = str(opened.version.number) if opened.version else None
    origin = Origin(manifest.name, number, opened.bundle.digest, target, engine, opened.lookup)
    if opened.production:
        return Session(opened.signature, executable, device, origin)
    return checked(opened, executable, device, origin)


def checked(
    opened: Opened, executable: Any, device: torch.device, origin: Origin
) -> CheckedSession:
    """Every answer is compared with that of the portable program on the same device."""
    return CheckedSession(
        opened.signature,
        executable,
        open_program(opened, device),
        tolerances_of(opened.bundle.manifest),
        device,
        origin,
    )


def measured_session(opened: Opened, target: str, engine_name: str | None = None) -> Session:
    """A plain session of one target, on a device of its kind, for those who measure it: by what was
    chosen there, or by one engine, whatever its verdict."""
    device = torch.device(Target.parse(target).torch_device)
    executable = open_artifact(opened, target, engine_name, device)
    return Session(opened.signature, executable, device)


def tolerances_of(manifest: Manifest) -> dict[str, Tolerance]:
    """The tolerances a version was validated with, by output."""
    for bound in Signature.from_dict(manifest.signature).outputs:
        if bound.name not in manifest.tolerances:
            raise LoadError(f"{manifest.name}: its manifest has no tolerance for {bound.name!r}")
    return dict(manifest.tolerances)


def device_here(device: str | torch.device) -> torch.device:
    """A device that torch has here; LoadError."""
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


def _everywhere(opened: Opened, opening: Opening) -> MultiDeviceSession:
    _settle_threads(opened, opening)
    return MultiDeviceSession(opened.signature, lambda device: _session(opened, opening, device))


def _one_target_each(opening: Opening) -> None:
    if opening.target is not None:
        raise LoadError(
            f"target {opening.target!r} with device 'auto': each device has its own target"
        )


def _settle_threads(opened: Opened, opening: Opening) -> None:
    """In production torch starts no threads of its own beyond those that a run may use."""
    require_openmp(opened.threads(opening))
    if opened.production or opening.threads is not None:
        torch.set_num_threads(opened.threads(opening))
    if opened.production and torch.get_num_interop_threads() != 1:
        with suppress(RuntimeError):  # torch takes this setting once, before its first use
            torch.set_num_interop_threads(1)
