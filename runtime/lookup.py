"""Lookup: from a reference to a version and its files, by asking the registry or without it.

Three policies. "fresh" asks, and fails where the registry cannot be asked. "prefer-cache" takes
what was found on this host less than `max_age_s` ago; else it asks, and where that fails it serves
what was found last, with a warning. "offline" takes what was found last and asks nobody: it opens
no connection and does not import MLflow.

What is taken without asking was once found by asking and passed every gate of its mode
(registry/resolved.py), and passes them again from the record: its promotion, the signatures that
policies asked for then, and every digest.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from registry.bundle import Bundle
from registry.cache import cache_root
from registry.errors import (
    NotCachedError,
    NotFoundError,
    RegistryError,
    RegistryUnavailableError,
)
from registry.reference import Ref
from registry.resolved import Resolution, Resolved, Signers
from registry.store import Registry
from registry.version import Version
from runtime.errors import LoadError
from soa.text import logger

Policy = Literal["fresh", "prefer-cache", "offline"]
MAX_AGE_S = 300.0
POLICIES: tuple[Policy, ...] = ("fresh", "prefer-cache", "offline")

log = logger("soa-pipeline")


@dataclass(frozen=True)
class Lookup:
    """How a session's version was found, for records."""

    policy: Policy
    at: datetime
    """When the registry said so (UTC)."""
    asked: bool
    """Whether it was asked for this session."""
    stale: str | None = None
    """Why it could not be asked, where it should have been."""


@dataclass(frozen=True)
class Found:
    """What a reference means, and how that is known."""

    resolution: Resolution
    lookup: Lookup

    @property
    def version(self) -> Version:
        return self.resolution.version


class Name:
    """A reference to a version of a registry, looked up by one policy for one mode."""

    def __init__(
        self, ref: Ref, store: Registry, mode: str, policy: Policy, max_age_s: float
    ) -> None:
        self.ref = ref
        self.store = store
        self._production = mode == "production"
        self._mode = mode
        self._policy = policy
        self._max_age_s = max_age_s
        self._kept = Resolved(cache_root(), repr(store), mode)

    def find(self, *, now: bool = False) -> Found:
        """`now`: however young what was found last is, the registry is asked if it may be.

        Raises NotFoundError, RegistryUnavailableError, or LoadError where nobody may be asked.
        """
        if self._policy == "offline":
            last = self._last()
            return Found(last, Lookup("offline", last.at, asked=False))
        if self._policy == "prefer-cache" and not now:
            young = self._young()
            if young is not None:
                return young
        try:
            return self._asked()
        except NotFoundError as error:
            if self.store.exists:
                self.forget()
                raise
            return self._in_place_of(error)
        except RegistryUnavailableError as error:
            return self._in_place_of(error)

    def open(self, found: Found) -> tuple[Found, Bundle]:
        """The files, digests checked; of what was found last where the store cannot be asked."""
        try:
            return found, self._opened(found)
        except RegistryUnavailableError as error:
            if not found.lookup.asked:
                raise
            last = self._in_place_of(error)
            return last, self._opened(last)

    def keep(self, found: Found) -> None:
        """To be called once it has passed its gates: for a time when the registry cannot be asked.

        A host whose cache cannot be written does without.
        """
        if found.lookup.asked:
            with contextlib.suppress(OSError):
                self._kept.write(str(self.ref), found.resolution)

    def forget(self) -> None:
        """To be called when the registry, or a gate, has said no."""
        self._kept.forget(str(self.ref))

    def _asked(self) -> Found:
        version = find_version(self.store, self.ref)
        policies = self.store.policies(version.name) if self._production else ()
        signers = [
            Signers(each.origin, each.policy.signed_by)
            for each in policies
            if each.policy.signed_by
        ]
        at = datetime.now(UTC)
        return Found(Resolution(version, tuple(signers), at), Lookup(self._policy, at, asked=True))

    def _young(self) -> Found | None:
        try:
            last = self._kept.read(str(self.ref))
        except RegistryError as error:
            log.warning("%s: the registry is asked: %s", self.ref, str(error))
            return None
        age = None if last is None else (datetime.now(UTC) - last.at).total_seconds()
        if last is None or age is None or not 0 <= age < self._max_age_s:
            return None
        return Found(last, Lookup(self._policy, last.at, asked=False))

    def _in_place_of(self, error: RegistryError) -> Found:
        """What was found last, if the policy has it so and there is such; else raises `error`."""
        last = None if self._policy != "prefer-cache" else self._kept.read(str(self.ref))
        if last is None:
            raise error
        log.warning(
            "%s: the registry cannot be asked, so %s is served, which it was at %s: %s",
            self.ref, last.version.ref, last.at.isoformat(timespec="seconds"), str(error),
        )  # fmt: skip
        return Found(last, Lookup(self._policy, last.at, asked=False, stale=str(error)))

    def _last(self) -> Resolution:
        last = self._kept.read(str(self.ref))
        if last is None:
            raise LoadError(
                f"{self.ref}: not known here for mode={self._mode!r}, and lookup='offline' asks "
                f"nobody: load it once with lookup='prefer-cache' from {self.store!r}"
            )
        return last

    def _opened(self, found: Found) -> Bundle:
        version = found.version
        try:
            return self.store.open(
                version,
                annexes=promoted_annexes(version) if self._production else None,
                in_place=self._policy != "prefer-cache",
                fetch=self.may_fetch(found),
            )
        except NotCachedError as error:
            raise LoadError(
                f"{self.ref}: {version.ref} was found before, but {error}: load it once with "
                "lookup='prefer-cache' where the registry can be asked"
            ) from error

    def may_fetch(self, found: Found) -> bool:
        return self._policy != "offline" and found.lookup.stale is None


def find_version(store: Registry, ref: Ref) -> Version:
    """As `Registry.find`; the message names a folder that may have been meant."""
    try:
        return store.find(ref)
    except NotFoundError as error:
        if Path(str(ref)).is_dir():
            raise NotFoundError(f"{error}; for the folder of that name write ./{ref}") from None
        raise


def promoted_annexes(version: Version) -> list[str]:
    """The targets built later that a promotion to production has let pass."""
    record = version.promotion("production")
    let_pass = record.annexes if record else {}
    return [t for t, digest in version.annexes.items() if let_pass.get(t) == digest]
