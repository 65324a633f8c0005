"""Make sessions of versions that `runtime.opening` has opened, on the devices where the data is.

A pickled session is opened again in the same way.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

from engines.base import Executable
from engines.errors import RunError
from engines.native import gpus
from engines.processes import Lock
from engines.target import Target
from runtime.errors import LoadError
from runtime.opening import (
    Mode,
    Opened,
    Opening,
    Options,
    name_to_look_up,
    open_artifact,
    open_here,
    open_program,
    open_version,
)
from runtime.process import has_torch, settle_threads, torch_runs_on
from runtime.session import Origin, Session
from soa.memory import CPU, Device, torch_drives_gpus
from soa.options import DEVICE, known_options, takes

if TYPE_CHECKING:
    import torch

    from runtime.checked import CheckedSession

AUTO = "auto"


@known_options(Opening)
@takes(LoadError, device=DEVICE)
def load(
    ref: str | Path,
    *,
    device: str | torch.device = "cpu",
    mode: Mode = "production",
    **options: Unpack[Options],
) -> Session:
    """A session on devices of this host; the options are those of `Opening`.

    `pipeline.load` offers more ways to run.
    """
    return load_here(Opening(ref, mode=mode, **options), device)


def load_here(opening: Opening, device: str | torch.device, live: bool = False) -> Session:
    """A session on a device of this host; "auto": on each device with data. `live`: a session that
    follows the name to later versions."""
    single = None if device == AUTO else find_device(device)
    if single is None and opening.target is not None:
        raise LoadError(
            f"target {opening.target!r} with device 'auto': each device has its own target"
        )
    if not live:
        return open_session(open_version(opening), single)
    if single is not None and single.type != "cpu" and not torch_runs_on(single):
        raise LoadError(
            f"live: torch must wait for {single} before the session moves to another version, and "
            "no torch that is built for GPUs is here: load it without live"
        )
    name = name_to_look_up(opening)
    if name is None or name.ref.version is not None:
        raise LoadError(
            f"live: {opening.ref} is always the same version: load it without live, or follow "
            "what is promoted, NAME@production"
        )
    from runtime.versions import LiveSession

    return LiveSession(name, lambda opened: open_session(opened, single))


def open_session(opened: Opened, device: torch.device | None) -> Session:
    """A session on `device`; None: on each device with data, opened at the first event there."""
    _require_reference(opened, device or CPU)
    limit = opened.production or opened.opening.threads is not None
    settle_threads(opened.threads, limit, opened.production)
    if device is None:
        from runtime.devices import MultiDeviceSession

        open_on = partial(_open_on_device, opened)
        session: Session = MultiDeviceSession(opened.signature, open_on)
    else:
        session = _open_on_device(opened, device)
    session.reopening = _record_reopening(opened, device, session.origin)
    return session


def _require_reference(opened: Opened, device: Device | torch.device) -> None:
    """Raise LoadError if test mode has no torch that runs the portable program on `device`."""
    if opened.production or torch_runs_on(device):
        return
    lacks = (
        "is not built for GPUs: install one that is"
        if has_torch()
        else "is not installed here: pip install torch"
    )
    raise LoadError(
        f"{opened.label}: test mode compares with the portable program, which torch runs, and "
        f"torch {lacks}, or load it with mode='production'",
        code="load-without-torch",
    )


def _open_on_device(opened: Opened, device: torch.device) -> Session:
    """A session on one device: compared in test mode, counted if `watch` says so."""
    _require_reference(opened, device)
    here = open_here(opened, device)
    executable, origin, any_start = here.executable, here.origin, here.any_start
    if opened.production:
        session = Session(opened.signature, executable, device, origin, any_start)
    else:
        session = open_checked_session(opened, executable, device, origin, any_start)
    if opened.opening.watch is not None or "PIPELINE_WATCH" in os.environ:
        from runtime.watch import make_watcher

        session.watcher = make_watcher(opened, device)
    return session


@dataclass(frozen=True)
class Reopening:
    """The version that a session runs, and how it was opened. The session is pickled as this.

    `opening` has the version with its number, or a folder by its full path, and the target of the
    session, so that every host with torch runs the same artifact. `registry` may hold a password.
    """

    opening: Opening
    registry: str | None = field(repr=False)
    digest: str
    """The bundle's digest."""
    device: str

    def __call__(self) -> Session:
        """The session of this process, opened once and shared by all that unpickle the same one.

        Raises the errors of `load`, and LoadError if the version has another digest now.
        """
        with _one_opens:
            session = _reopened.get((os.getpid(), self))  # a child of a fork opens its own
            if session is None or session.closed:
                session = self._open()
            self._keep(session)
            return session

    def share(self, session: Session) -> None:
        """Make `session`, which is open and is pickled as this, the session of this process."""
        with _one_opens:
            self._keep(session)

    def _keep(self, session: Session) -> None:
        """Keep a session as the one used last; of more than KEPT, forget the one used least
        recently. The caller holds `_one_opens`."""
        key = os.getpid(), self
        _reopened.pop(key, None)
        _reopened[key] = session  # at the end: used last
        if len(_reopened) > KEPT:
            del _reopened[next(iter(_reopened))]

    def _open(self) -> Session:
        """Open the version again. Raises LoadError if it has another digest now."""
        opened = open_version(replace(self.opening, registry=self.registry))
        if opened.bundle.digest != self.digest:
            raise LoadError(
                f"{self.opening.ref} is not what it was when its session was pickled: its digest "
                f"is {opened.bundle.digest[:12]}, it was {self.digest[:12]}: load it anew",
                code="load-altered",
            )
        return open_session(opened, None if self.device == AUTO else find_device(self.device))


# The process is part of the key. Only KEPT sessions stay: a long-lived worker meets many versions.
_reopened: dict[tuple[int, Reopening], Session] = {}
_one_opens = Lock()
KEPT = 8


def _record_reopening(
    opened: Opened, device: torch.device | None, origin: Origin | None
) -> Reopening:
    """How another process opens the same version again."""
    opening, by_name = opened.opening, opened.lookup is not None
    keys = opening.trusted_keys
    if keys is not None:
        paths = [keys] if isinstance(keys, str | Path) else keys
        keys = tuple(str(Path(path).absolute()) for path in paths)
    pinned = replace(
        opening,
        ref=opened.label if by_name else opened.bundle.path,
        registry=None,
        trusted_keys=keys,
        target=origin.target if origin else None,
    )
    registry = opening.store().uri if by_name else None
    return Reopening(pinned, registry, opened.bundle.digest, str(device or AUTO))


def open_checked_session(
    opened: Opened, executable: Executable, device: torch.device, origin: Origin, any_start: bool
) -> CheckedSession:
    """A session that compares every answer with the portable program's, on the same device."""
    from runtime.checked import CheckedSession, recorded_tolerances  # they need torch

    reference = open_program(opened, device)
    tolerances = recorded_tolerances(opened.bundle.manifest)
    return CheckedSession(
        opened.signature, executable, reference, tolerances, device, origin, any_start
    )


def open_measured_session(opened: Opened, target: str, engine_name: str | None = None) -> Session:
    """A session of one target for measurements, on a device of its kind. It runs the artifacts
    chosen for the target, or the artifact of one engine, even if that is not valid."""
    import torch

    device = torch.device(Target.parse(target).torch_device)
    executable = open_artifact(opened, target, engine_name, device)
    return Session(opened.signature, executable, device)


_ONLY_CPU = "without torch, which is not installed, use 'cpu'"


def find_device(device: str | torch.device) -> torch.device:
    """A device of this host. The CPU, and an NVIDIA GPU that its driver sees, need no torch. Raises
    LoadError for a device that is not here."""
    if str(device) == "cpu" and "torch" not in sys.modules:
        return cast("torch.device", CPU)  # torch accepts it
    if re.fullmatch("cuda(:[0-9]+)?", str(device)) and not torch_drives_gpus():
        return cast("torch.device", _find_gpu_by_driver(Device(str(device))))
    if not has_torch():
        raise LoadError(
            f"device {str(device)!r}: {_ONLY_CPU} or 'cuda:0'", code="load-without-torch"
        )
    import torch

    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise LoadError(
            f"device {device!r}: use 'cpu', 'cuda' or 'cuda:1' (ROCm too is 'cuda'), or 'auto'"
        )
    if parsed.type == "cuda" and parsed.index is None and torch.cuda.is_available():
        parsed = torch.device("cuda", torch.cuda.current_device())
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise LoadError(f"device {str(parsed)!r}: torch sees {torch.cuda.device_count()} GPUs here")
    return parsed


def _find_gpu_by_driver(device: Device) -> Device:
    """An NVIDIA GPU that its driver sees, if no torch that is built for GPUs is installed."""
    code = LoadError.code if has_torch() else "load-without-torch"
    lacks = "torch sees 0 GPUs here" if has_torch() else _ONLY_CPU
    try:
        count = len(gpus())
    except RunError as error:
        raise LoadError(f"device {str(device)!r}: {lacks}; {error}", code=code) from None
    if (device.index or 0) >= count:
        why = f"{lacks}; NVIDIA's driver sees {count}"
        raise LoadError(f"device {str(device)!r}: {why}", code=code)
    return device
