"""Open a shadow beside a session, and choose where its record is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from registry.bundle import record_to_json
from registry.shadow_record import ShadowRecord
from registry.trust import require_signature
from runtime.errors import LoadError
from runtime.opening import Opening, keys_asked_for, open_here, open_version
from runtime.session import Session
from runtime.versions.live import can_replace
from runtime.versions.shadow import ShadowedSession
from soa.files import write_whole


def shadowed(
    session: Session,
    opening: Opening,
    shadow: str | Path,
    fraction: float,
    record: str | Path | None,
) -> ShadowedSession:
    """The opened session, with a second version that runs on a fraction of its events.

    `shadow`: a ref, or `@alias` of the same model. It need not be promoted, but it must be signed
    if this host asks for signatures. The record goes to the registry, or into `record`, a file of
    this session alone. Raises LoadError.
    """
    if session.device.type != "cpu" or session.origin is None:
        raise LoadError(f"a shadow runs on CPUs; found device {str(session.device)!r}")
    if not 0 <= fraction <= 1:
        raise LoadError(f"shadow_fraction={fraction}: a number from 0 to 1 is needed")
    origin, file = session.origin, None if record is None else Path(record)
    ref = f"{origin.name}{shadow}" if str(shadow).startswith("@") else shadow
    asked = replace(opening, ref=ref, mode="test", target=None, engine_name=None, builder=None)
    opened = open_version(asked)
    for keys in keys_asked_for({}, opening.trusted_keys) if opening.production else ():
        require_signature(opened.bundle, keys, opened.label)
    begun = ShadowRecord(
        version=opened.label,
        digest=opened.bundle.digest,
        production="/".join(filter(None, (origin.name, origin.version))),
        production_digest=str(origin.digest),
    )
    if not can_replace(opened.signature, session.signature):
        raise LoadError(
            f"the shadow {begun.version} has another signature than {begun.production}: "
            f"`pipeline show {begun.production} {begun.version}` says where"
        )
    if file is None and (opened.lookup is None or not origin.version or asked.lookup == "offline"):
        raise LoadError(
            f"{begun.version} beside {begun.production}: a folder, or lookup='offline', has no "
            "registry to keep the record of a shadow: write shadow_record=FILE"
        )
    here = open_here(opened, torch.device("cpu"))
    second = Session(opened.signature, here.executable, "cpu", here.origin, here.any_start)
    try:
        keep = _keeper(begun, file, asked)
    except LoadError:
        second.close()
        raise
    return ShadowedSession(session, second, fraction, begun, keep)


def _keeper(
    begun: ShadowRecord, file: Path | None, asked: Opening
) -> Callable[[ShadowRecord], None]:
    """A function that adds to the record in the registry or in `file`, which must be a new file."""
    whole = begun

    def keep(seen: ShadowRecord) -> None:
        nonlocal whole
        if file is None:
            asked.store().add_shadow(seen)
        else:
            write_whole(file, record_to_json(whole.plus([seen])))
        whole = whole.plus([seen])

    if file is not None:
        if file.exists():
            raise LoadError(f"shadow_record={str(file)!r} is there already: name a new file")
        try:
            keep(begun)
        except OSError as error:
            raise LoadError(f"{file} cannot be written: {error.strerror}") from error
    return keep
