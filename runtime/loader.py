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
    """Load a version, and return a session that runs it on a device of this host.

    `ref`: a version's name, or the folder of a bundle. `options`: the fields of `Opening`.
    `pipeline.load` offers more ways to run. Raises LoadError, and the errors of the registry.
    """
    return load_here(Opening(ref, mode=mode, **options), device)


def load_here(opening: Opening, device: str | torch.device, live: bool = False) -> Session:
    """Load what `opening` names, and return a session on a device of this host.

    `device`: "auto" opens the model on each device that has data. `live`: the session follows the
    name to later versions. Raises LoadError if the options contradict each other.
    """
    single = None if device == AUTO else find_device(device)  # None: on every device
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
    """Open a session of a checked version on `device`.

    None: the session runs on every device, and opens the model there at the first event.
    """
    _require_reference(opened, device or CPU)
    limit_torch = opened.production or opened.opening.threads is not None
    settle_threads(opened.threads, limit_torch, opened.production)
    if device is None:
        from runtime.devices import MultiDeviceSession

        open_on = partial(_open_on_device, opened)
        session: Session = MultiDeviceSession(opened.signature, open_on)
    else:
        session = _open_on_device(opened, device)
    session.reopening = _reopening_of(opened, device, session.origin)
    return session


def _require_reference(opened: Opened, device: Device | torch.device) -> None:
    """Raise LoadError if the mode is "test", and no torch here runs on `device`.

    Test mode needs it for the portable program, with which it compares.
    """
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
    """Open the session of one device. In test mode it compares each answer with the reference.

    With the option `watch`, or the variable PIPELINE_WATCH, its calls are counted for drift.
    """
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
    """Says how another process opens the version of a session again. A session is pickled as this.

    `opening` names the version with its number, or the folder by its full path, and the session's
    target, so that every host with torch runs the same artifact. `registry`: the registry's URI,
    which may hold a password; None for a folder.
    """

    opening: Opening
    registry: str | None = field(repr=False)
    digest: str
    """The bundle's digest."""
    device: str

    def __call__(self) -> Session:
        """Return this process's session of the version; the first call opens it.

        All sessions that are unpickled from the same version share it. Raises the errors of `load`,
        and LoadError if the version has another digest now.
        """
        with _one_opens:
            session = _reopened.get((os.getpid(), self))  # a child of a fork opens its own
            if session is None or session.closed:
                session = self._open()
            self._keep(session)
            return session

    def share(self, session: Session) -> None:
        """Let this process unpickle to `session`, which is open already, instead of opening it."""
        with _one_opens:
            self._keep(session)

    def _keep(self, session: Session) -> None:
        """Keep a session as the most recently used one. The caller holds `_one_opens`.

        If more than KEPT sessions are kept, the least recently used one is forgotten.
        """
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


def _reopening_of(opened: Opened, device: torch.device | None, origin: Origin | None) -> Reopening:
    """Record how another process opens the version of a new session again.

    `device`: None for a session on every device. `origin`: None for such a session, too.
    """
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
    """Open a session of test mode: it compares every answer with that of the portable program.

    `executable`: the artifact to test. The program runs on the same device.
    """
    from runtime.checked import CheckedSession, recorded_tolerances  # they need torch

    reference = open_program(opened, device)
    tolerances = recorded_tolerances(opened.bundle.manifest)
    return CheckedSession(
        opened.signature, executable, reference, tolerances, device, origin, any_start
    )


def open_measured_session(opened: Opened, target: str, engine_name: str | None = None) -> Session:
    """Open a session of one target to measure it, on a device of the target's kind.

    It runs the artifacts that were chosen for the target. `engine_name`: it runs the artifact of
    this engine instead, even if that is not valid.
    """
    import torch

    device = torch.device(Target.parse(target).torch_device)
    executable = open_artifact(opened, target, engine_name, device)
    return Session(opened.signature, executable, device)


_ONLY_CPU = "without torch, which is not installed, use 'cpu'"


def find_device(device: str | torch.device) -> torch.device:
    """Return the device of this host with that name. Raises LoadError if there is none.

    The CPU, and an NVIDIA GPU that its driver sees, need no torch. `cuda` without a number is
    torch's current GPU.
    """
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
    """Check that NVIDIA's driver sees this GPU, and return the device. Raises LoadError if not.

    This is for hosts without a torch that is built for GPUs.
    """
    code = LoadError.code if has_torch() else "load-without-torch"
    lacks = "torch sees 0 GPUs here" if has_torch() else _ONLY_CPU
    try:
        count = len(gpus())
    except RunError as error:
        raise LoadError(f"device {str(device)!r}: {lacks}; {error}", code=code) from None
    if (device.index or 0) >= count:
        lacks = f"{lacks}; NVIDIA's driver sees {count}"
        raise LoadError(f"device {str(device)!r}: {lacks}", code=code)
    return device
