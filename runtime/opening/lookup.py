"""The one route from a name to a version that may be used: look up, fetch, check.

Everything that runs a version, or passes it on to be run, uses this file. The registry says which
version a name means and gives its files; this file checks whether it may be used. Only
`Opening.mode` decides which checks are left out. A version from this host's record of an earlier
lookup (`Opening.lookup`) passes the same checks, with the promotion and the keys in that record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from registry.bundle import PulledNote, open_folder, read_note
from registry.errors import (
    BundleError,
    NoRegistryError,
    NotCachedError,
    NotFoundError,
    RegistryError,
    RegistryUnavailableError,
    TrustError,
)
from registry.ref import Ref, parse_ref
from registry.trust import require_signature
from runtime.errors import LoadError
from runtime.opening.production_trust import (
    NOT_SIGNED,
    read_required_keys,
    require_promoted,
    require_vouched,
    usable_annexes,
)
from runtime.opening.request import Opened, Opening
from soa.text import logger

if TYPE_CHECKING:  # opening a folder does not import the registry
    from registry.store import Lookup
    from registry.version import Version

log = logger("soa-pipeline")


def open_version(
    opening: Opening, annexes: Collection[str] | None = None, *, canary: bool = False
) -> Opened:
    """Open a version, or the bundle of a folder, after all checks of its mode.

    An annex is a target that was built later than the version. `annexes`: the annexes to use; None:
    all of them. `canary`: see `Name`. Raises LoadError, or the error of the registry.
    """
    ref = _parse_ref_or_folder(opening)
    if isinstance(ref, Path):
        return _open_folder(ref, opening)
    name = Name(ref, opening, canary)
    return name.open(name.find(), annexes)


def name_to_look_up(opening: Opening) -> Name | None:
    """Return the name that `opening` asks for; None if it asks for a folder."""
    ref = _parse_ref_or_folder(opening)
    return None if isinstance(ref, Path) else Name(ref, opening)


def _parse_ref_or_folder(opening: Opening) -> Ref | Path:
    """Return the folder to open, or the reference to a version. Raises RegistryError."""
    return opening.ref if isinstance(opening.ref, Path) else parse_ref(opening.ref)


class Name:
    """A reference to a version in a registry, looked up by the policy of its opening.

    `canary`: production also takes a version that gates let into the alias of `ref`, or into
    `staging`, instead of `production`.
    """

    def __init__(self, ref: Ref, opening: Opening, canary: bool = False) -> None:
        """Choose the registry, and the record of lookups of this host for the mode."""
        from registry.store import LookupCache, cache_root

        self.ref = ref
        self.opening = opening
        self._store = opening.store()
        self._canary = canary
        mode = "canary" if canary and opening.production else opening.mode
        self._record = LookupCache(cache_root(), repr(self._store), mode)

    def find(self, *, now: bool = False) -> Lookup:
        """Find the version, in the registry or in this host's record of an earlier lookup.

        `now`: ask the registry even if the record is young, unless the policy forbids asking.

        Raises NotFoundError, RegistryUnavailableError, or LoadError if the policy forbids asking.
        """
        policy = self.opening.lookup
        if policy == "offline":
            recorded = self._read_record()
            if recorded is None:
                raise LoadError(
                    f"{self.ref}: not known here for mode={self.opening.mode!r}, and "
                    "lookup='offline' opens no connection: load it once with lookup='prefer-cache' "
                    f"from {self._store.shown}"
                )
            return recorded
        if policy == "prefer-cache" and not now:
            young = self._read_young_record()
            if young is not None:
                return young
        try:
            return self._ask()
        except (NoRegistryError, RegistryUnavailableError) as error:
            return self._read_record_or_raise(error)
        except NotFoundError as error:
            if self._store.exists:
                self._record.forget(str(self.ref))
                raise
            return self._read_record_or_raise(error)

    def open(self, lookup: Lookup, annexes: Collection[str] | None = None) -> Opened:
        """Open the version that was looked up. `annexes`: as in `open_version`.

        If its files cannot be fetched, the version of this host's record is opened instead, as far
        as the policy allows that.
        """
        try:
            return self._open_allowed(lookup, annexes)
        except RegistryUnavailableError as error:
            if not lookup.asked:
                raise
            return self._open_allowed(self._read_record_or_raise(error), annexes)

    def _open_allowed(self, lookup: Lookup, annexes: Collection[str] | None) -> Opened:
        """Open the version that was looked up, if it may be used. Raises LoadError, TrustError.

        An answer of the registry is recorded once it has passed; if it is refused, the record is
        removed.
        """
        opening, version = self.opening, lookup.version
        fetch = opening.lookup != "offline" and lookup.stale is None
        usable: Collection[str] = version.annexes
        withheld: dict[str, str] = {}
        key_groups = []
        try:
            if opening.production:
                promotion = require_promoted(version, lookup.history, self._required_alias(version))
                lookup = replace(lookup, version=version.promoted(promotion))
                key_groups = read_required_keys(lookup.signers, opening.trusted_keys)
                usable, withheld = usable_annexes(version, promotion, bool(key_groups))
            targets = [target for target in usable if annexes is None or target in annexes]
            in_place = opening.lookup != "prefer-cache"
            bundle = self._store.open(
                lookup.version, annexes=targets, in_place=in_place, fetch=fetch
            )
            for keys in key_groups:
                self._store.require_signature(version, bundle, keys, fetch=fetch)
        except NotCachedError as error:
            raise LoadError(
                f"{self.ref}: {version.ref} was found before, but {error}: load it once with "
                "lookup='prefer-cache' where the registry can be asked"
            ) from error
        except (LoadError, TrustError):
            if lookup.asked:
                self._record.forget(str(self.ref))
            raise
        if lookup.asked:
            with contextlib.suppress(OSError):  # a cache that cannot be written is no error
                self._record.write(str(self.ref), lookup)
        return Opened(bundle, version.name, version.number, lookup, opening, withheld)

    def _required_alias(self, version: Version) -> str:
        """Return the alias into which gates must have let the version.

        It is `production`. For a canary it is the first of `production` and `staging` into which
        the version was promoted, else the alias of the reference.
        """
        from registry.history import PRODUCTION, STAGING

        if not self._canary:
            return PRODUCTION
        for alias in (PRODUCTION, STAGING):
            if version.promotion(alias) is not None:
                return alias
        return self.ref.alias or STAGING

    def _ask(self) -> Lookup:
        """Ask the registry for the version; in production also for its policies and promotions.

        Raises NotFoundError, and the errors of a registry that cannot be asked.
        """
        from registry.store import Lookup

        asked_at = datetime.now(UTC)  # the answer is at least as new as this
        try:
            version = self._store.find(self.ref)
        except NotFoundError as error:
            if Path(str(self.ref)).is_dir():
                raise NotFoundError(
                    f"{error}; for the folder of that name write ./{self.ref}"
                ) from None
            raise
        lookup = Lookup(version, {}, asked_at, self.opening.lookup, asked=True)
        if not self.opening.production:
            return lookup
        signers = {
            stated.origin: stated.policy.signed_by
            for stated in self._store.policies(version.name)
            if stated.policy.signed_by
        }
        history = self._store.promotions(version, self._required_alias(version))
        return replace(lookup, signers=signers, history=history)

    def _read_record(self) -> Lookup | None:
        """Read this host's record of an earlier lookup; None if there is none.

        Raises RegistryError for a damaged record.
        """
        last = self._record.read(str(self.ref))
        return None if last is None else replace(last, policy=self.opening.lookup)

    def _read_record_or_raise(self, error: RegistryError) -> Lookup:
        """Return the recorded lookup, with a warning in the log.

        Raises `error` if there is no record, or if the policy is not "prefer-cache".
        """
        last = self._read_record() if self.opening.lookup == "prefer-cache" else None
        if last is None:
            raise error
        log.warning(
            "%s: the registry cannot be asked, so %s is served, as found at %s: %s",
            self.ref, last.version.ref, last.at.isoformat(timespec="seconds"), str(error),
        )  # fmt: skip
        return replace(last, stale=str(error))

    def _read_young_record(self) -> Lookup | None:
        """Return the recorded lookup if it is younger than `max_age_s`, else None.

        A record of the future, as after a change of the clock, does not count.
        """
        try:
            last = self._read_record()
        except RegistryError as error:
            log.warning("%s: no usable record, so the registry is asked: %s", self.ref, str(error))
            return None
        if last is None:
            return None
        age = (datetime.now(UTC) - last.at).total_seconds()
        return last if 0 <= age < self.opening.max_age_s else None


def _open_folder(folder: Path, opening: Opening) -> Opened:
    """Open the bundle of a folder.

    In production the folder must have the note that `pipeline pull` wrote for a promoted version.
    """
    withheld: dict[str, str] = {}
    if opening.production:
        note = read_note(folder) if folder.is_dir() else None
        key_groups = read_required_keys({}, opening.trusted_keys)
        promoted: Mapping[str, str] = note.annexes if note else {}
        if key_groups:  # no signature covers an annex
            promoted, withheld = {}, dict.fromkeys(promoted, NOT_SIGNED)
        bundle = open_folder(folder, only=promoted)
        require_vouched(opening.ref, note, bundle)
        for keys in key_groups:
            require_signature(bundle, keys)
    else:
        bundle = open_folder(folder)
        note = _read_own_note(folder, bundle.digest)
    ref = _parse_noted_ref(note)
    if ref is None:
        return Opened(bundle, bundle.manifest.name, None, None, opening, withheld)
    return Opened(bundle, ref.name, ref.version, None, opening, withheld)


def _read_own_note(folder: Path, digest: str) -> PulledNote | None:
    """Read the note of a pulled folder in test mode, which needs none.

    Returns None if there is no note, if it is unreadable, or if it is of another bundle. `digest`:
    the digest of the folder's bundle.
    """
    try:
        note = read_note(folder)
    except BundleError:
        return None
    return note if note and note.digest == digest else None


def _parse_noted_ref(note: PulledNote | None) -> Ref | None:
    """Return the version of which the note says that its folder is a copy.

    None if there is no note, or if it names no version with a number.
    """
    try:
        ref = parse_ref(note.ref) if note else None
    except RegistryError:
        return None
    return ref if isinstance(ref, Ref) and ref.version is not None else None
