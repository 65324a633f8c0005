"""The one route from a reference to an artifact: look up, promoted, trusted, choose, open.

Whatever runs a version, or hands it to who will, comes this way. The registry says which version a
name means, what it knows of it, and gives its files; here is judged whether it may be used. What
may be left out is `Opening.mode`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from engines.base import Executable
from registry.bundle import PulledNote, open_folder, read_note
from registry.errors import BundleError, RegistryError, RegistryUnavailableError, TrustError
from registry.reference import Ref, parse_ref
from registry.store import Lookup
from registry.trust import require_signature
from runtime.errors import LoadError
from runtime.opening.artifact import open_artifact
from runtime.opening.choice import choose, completed, require_engine
from runtime.opening.names import Name
from runtime.opening.records import Opened, Opening
from runtime.opening.tf32 import settle_tf32
from runtime.opening.trust import (
    NOT_SIGNED,
    keys_asked_for,
    require_promoted,
    require_vouched,
    usable_annexes,
)


def open_version(opening: Opening, annexes: Collection[str] | None = None) -> Opened:
    """A version, or the bundle of a folder, once it has passed all that its mode asks for.

    `annexes`: of the targets that were built for a version later, these at most.
    Raises LoadError, or the registry's error of what went wrong.
    """
    ref = _parsed(opening)
    if isinstance(ref, Path):
        return _open_folder(ref, opening)
    name = Name(ref, opening)
    return open_found(name, name.find(), annexes)


def name_of(opening: Opening) -> Name | None:
    """What is to be looked up; None for a folder."""
    ref = _parsed(opening)
    return None if isinstance(ref, Path) else Name(ref, opening)


def open_found(name: Name, found: Lookup, annexes: Collection[str] | None = None) -> Opened:
    """What was found; in its place what was found last, where the store cannot be asked."""
    try:
        return _judged(name, found, annexes)
    except RegistryUnavailableError as error:
        if not found.asked:
            raise
        return _judged(name, name.in_place_of(error), annexes)


def open_here(
    opened: Opened, opening: Opening, device: torch.device
) -> tuple[Executable, str, str]:
    """The artifact to run on a device of this host, its target, and its engine for people."""
    if opening.builder is not None:
        opened = completed(opened, device, opening.target, opening.builder)
    target = choose(opened, device, opening.target)
    require_engine(opened, target, opening.engine_name)
    manifest = opened.bundle.manifest
    if device.type == "cuda":
        settle_tf32(manifest.capture.precision == "tf32", manifest.name)
    given, settings = opening.instances, manifest.session
    instances = settings.instances if given is None else given
    made = open_artifact(
        opened, target, opening.engine_name, device, opened.threads(opening), instances
    )
    return made, target, opening.engine_name or manifest.targets[target].choice()


def _judged(name: Name, found: Lookup, annexes: Collection[str] | None) -> Opened:
    opening, version = name.opening, found.version
    usable: Collection[str] = version.annexes
    withheld: dict[str, str] = {}
    asked = []
    try:
        if opening.production:
            promotion = require_promoted(version, found.history)
            found = replace(found, version=version.promoted(promotion))
            asked = keys_asked_for(found.signers, opening.trusted_keys)
            usable, withheld = usable_annexes(version, promotion, bool(asked))
        wanted = [target for target in usable if annexes is None or target in annexes]
        bundle = name.files(found, wanted)
        for keys in asked:
            name.store.require_signature(version, bundle, keys, fetch=name.may_fetch(found))
    except (LoadError, TrustError):
        if found.asked:
            name.forget()
        raise
    name.keep(found)
    return Opened(bundle, version.name, version.number, found, opening.production, withheld)


def _open_folder(folder: Path, opening: Opening) -> Opened:
    production = opening.production
    note = read_note(folder) if production and folder.is_dir() else None
    asked = keys_asked_for({}, opening.trusted_keys) if production else []
    later = note.annexes if note else {}
    only = ({} if asked else later) if production else None
    bundle = open_folder(folder, only=only)
    if production:
        require_vouched(opening.ref, note, bundle)
        for keys in asked:
            require_signature(bundle, keys)
    else:
        note = _note_of(folder, bundle.digest)
    ref = _named(note)
    return Opened(
        bundle,
        ref.name if ref else bundle.manifest.name,
        ref.version if ref else None,
        None,
        production,
        dict.fromkeys(later, NOT_SIGNED) if asked else {},
    )


def _parsed(opening: Opening) -> Ref | Path:
    return opening.ref if isinstance(opening.ref, Path) else parse_ref(opening.ref)


def _note_of(folder: Path, digest: str) -> PulledNote | None:
    """In test mode a note that cannot be read, or is of another bundle, says nothing."""
    try:
        note = read_note(folder)
    except BundleError:
        return None
    return note if note and note.digest == digest else None


def _named(note: PulledNote | None) -> Ref | None:
    """The version that a pulled folder is a copy of, by its note."""
    try:
        ref = parse_ref(note.ref) if note else None
    except RegistryError:
        return None
    return ref if isinstance(ref, Ref) and ref.version is not None else None
