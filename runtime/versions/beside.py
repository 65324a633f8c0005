"""Open a second version beside a session, as a shadow or a canary, and choose where its record is
kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from registry.bundle import record_to_json
from registry.shadow_record import ShadowRecord
from registry.trust import require_signature
from runtime.errors import LoadError
from runtime.opening import Opened, Opening, open_here, open_version, read_required_keys
from runtime.process import has_torch
from runtime.session import Session
from runtime.versions.canary import CanaryLimits, CanarySession
from runtime.versions.live import can_replace
from runtime.versions.second import Results
from soa.files import write_whole

if TYPE_CHECKING:  # a canary needs no torch
    from runtime.versions.shadow import ShadowedSession

Ref = str | Path


def open_with_shadow(
    session: Session, opening: Opening, shadow: Ref, fraction: float, record: Ref | None
) -> ShadowedSession:
    """Open a second version as a shadow: it runs on a fraction of the session's events.

    Returns a session that replaces `session`, and owns it.

    `shadow`: a ref, or `@alias` of the same model. It need not be promoted, but it must be signed
    if this host asks for signatures. `record`: a new file for the record of the comparison; None:
    the registry keeps it. Raises LoadError.
    """
    any_version = replace(opening, mode="test", builder=None)
    opened = open_version(
        _second_opening("shadow_fraction", fraction, session, any_version, shadow)
    )
    if opening.production:
        for keys in read_required_keys({}, opening.trusted_keys):
            require_signature(opened.bundle, keys, opened.label)
    second, results = _open_second(session, opened, record, _open_unchecked)
    from runtime.versions.shadow import ShadowedSession

    return ShadowedSession(session, second, fraction, results)


def open_with_canary(
    session: Session,
    opening: Opening,
    canary: Ref,
    share: float,
    limits: CanaryLimits,
    record: Ref | None,
    open_: Callable[[Opened], Session],
) -> CanarySession:
    """Open a second version as a canary: it answers a share of the session's calls.

    Returns a session that replaces `session`, and owns it.

    `canary`: a ref, or `@alias` of the same model. In production, gates must have let it into that
    alias, into `staging` or into `production`. `open_` opens it as the session was opened.
    `record`: as for a shadow. Raises LoadError.
    """
    if limits.compare and not has_torch():
        raise LoadError("CanaryLimits(compare=...) needs torch: pip install torch")
    if share == 1 and limits.max_slowdown is not None:
        raise LoadError("max_slowdown with share=1: production runs no call to compare times with")
    opened = open_version(_second_opening("share", share, session, opening, canary), canary=True)
    second, results = _open_second(session, opened, record, open_)
    return CanarySession(session, second, share, limits, results)


def _second_opening(
    name: str, share: float, session: Session, opening: Opening, ref: Ref
) -> Opening:
    """Return what to open as the second version of `session`, by the rules of `opening`.

    `share`: the share of its calls, given by the option `name`. Raises LoadError if the session or
    the share does not allow a second version.
    """
    if session.device.type != "cpu" or session.origin is None:
        raise LoadError(f"a second version runs on CPUs; found device {str(session.device)!r}")
    if not 0 <= share <= 1:
        raise LoadError(f"{name}={share}: a number from 0 to 1 is needed")
    if str(ref).startswith("@"):
        ref = f"{session.origin.name}{ref}"
    return replace(opening, ref=ref, target=None, engine_name=None)


def _open_second(
    session: Session, opened: Opened, record: Ref | None, open_: Callable[[Opened], Session]
) -> tuple[Session, Results]:
    """Open the session of the second version, and make the results that it adds to.

    `record`: the file that keeps the results; None: the registry keeps them. Raises LoadError if
    the second version cannot replace the first, or if the results cannot be kept.
    """
    origin = session.origin
    assert origin is not None
    empty = ShadowRecord(
        version=opened.label,
        digest=opened.bundle.digest,
        production=f"{origin.name}/{origin.version}" if origin.version else origin.name,
        production_digest=str(origin.digest),
    )
    if not can_replace(opened.signature, session.signature):
        raise LoadError(
            f"{empty.version} has another signature than {empty.production}: "
            f"`pipeline show {empty.production} {empty.version}` says where"
        )
    offline = opened.opening.lookup == "offline"
    file = None if record is None else Path(record)
    if file is None and (opened.lookup is None or not origin.version or offline):
        raise LoadError(
            f"{empty.version} beside {empty.production}: a folder, or lookup='offline', has no "
            "registry to keep the record: write shadow_record=FILE"
        )
    second = open_(opened)
    try:
        keep = _registry_keeper(opened.opening) if file is None else _file_keeper(file, empty)
    except LoadError:
        second.close()
        raise
    return second, Results(empty, keep)


def _open_unchecked(opened: Opened) -> Session:
    """Open a session on this CPU that compares nothing, even in test mode."""
    import torch

    here = open_here(opened, torch.device("cpu"))
    return Session(opened.signature, here.executable, "cpu", here.origin, here.any_start)


def _registry_keeper(opening: Opening) -> Callable[[ShadowRecord], None]:
    """Return a function that adds results to the record in the registry of `opening`."""
    return lambda results: opening.store().add_shadow(results)


def _file_keeper(file: Path, empty: ShadowRecord) -> Callable[[ShadowRecord], None]:
    """Create `file` with an empty record, and return a function that adds results to it.

    Raises LoadError if the file exists or cannot be written.
    """
    total = empty

    def keep(results: ShadowRecord) -> None:
        """Add results to the total, and write it. If it raises OSError, nothing was added."""
        nonlocal total
        with_results = total.plus([results])
        write_whole(file, record_to_json(with_results))
        total = with_results

    if file.exists():
        raise LoadError(f"shadow_record={str(file)!r} is there already: name a new file")
    try:
        keep(empty)
    except OSError as error:
        raise LoadError(f"{file} cannot be written: {error.strerror}") from error
    return keep
