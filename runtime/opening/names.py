"""From a name to a version and its files, by asking the registry or without it.

Three policies. "fresh" asks, and fails where the registry cannot be asked. "prefer-cache" takes
what was found on this host less than `max_age_s` ago; else it asks, and where that fails it serves
what was found last, with a warning. "offline" takes what was found last and asks nobody: it opens
no connection and does not import MLflow.

What is taken without asking was once found by asking and passed every gate of its mode
(registry/store/lookups.py), and passes them again from the record: its promotion, the signatures
that policies asked for then, and every digest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from registry.bundle import Bundle
from registry.errors import NotCachedError, NotFoundError, RegistryError, RegistryUnavailableError
from registry.history import PRODUCTION
from registry.mlflow import Version
from registry.reference import Ref
from registry.store import Lookup, LookupCache, cache_root
from runtime.errors import LoadError
from runtime.opening.records import Opening
from soa.text import logger

log = logger("soa-pipeline")


class Name:
    """A reference to a version of a registry, looked up by one policy for one mode."""

    def __init__(self, ref: Ref, opening: Opening) -> None:
        self.ref = ref
        self.opening = opening
        self.store = opening.store()
        self._kept = LookupCache(cache_root(), repr(self.store), opening.mode)

    def find(self, *, now: bool = False) -> Lookup:
        """`now`: however young what was found last is, the registry is asked if it may be.

        Raises NotFoundError, RegistryUnavailableError, or LoadError where nobody may be asked.
        """
        policy = self.opening.lookup
        if policy == "offline":
            return self._last()
        if policy == "prefer-cache" and not now:
            young = self._young()
            if young is not None:
                return young
        try:
            return self._asked()
        except NotFoundError as error:
            if self.store.exists:
                self.forget()
                raise
            return self.in_place_of(error)
        except RegistryUnavailableError as error:
            return self.in_place_of(error)

    def in_place_of(self, error: RegistryError) -> Lookup:
        """What was found last, if the policy has it so and there is such; else raises `error`."""
        last = self._read() if self.opening.lookup == "prefer-cache" else None
        if last is None:
            raise error
        log.warning(
            "%s: the registry cannot be asked, so %s is served, which it was at %s: %s",
            self.ref, last.version.ref, last.at.isoformat(timespec="seconds"), str(error),
        )  # fmt: skip
        return replace(last, stale=str(error))

    def files(self, found: Lookup, annexes: Collection[str]) -> Bundle:
        """The bundle with these of its annexes, digests checked."""
        try:
            return self.store.open(
                found.version,
                annexes=annexes,
                in_place=self.opening.lookup != "prefer-cache",
                fetch=self.may_fetch(found),
            )
        except NotCachedError as error:
            raise LoadError(
                f"{self.ref}: {found.version.ref} was found before, but {error}: load it once with "
                "lookup='prefer-cache' where the registry can be asked"
            ) from error

    def may_fetch(self, found: Lookup) -> bool:
        return self.opening.lookup != "offline" and found.stale is None

    def keep(self, found: Lookup) -> None:
        """To be called once it has passed its gates: for a time when the registry cannot be asked.

        A host whose cache cannot be written does without.
        """
        if found.asked:
            with contextlib.suppress(OSError):
                self._kept.write(str(self.ref), found)

    def forget(self) -> None:
        """To be called when the registry, or a gate, has said no."""
        self._kept.forget(str(self.ref))

    def _asked(self) -> Lookup:
        """With all that is to be judged of it: production's is more."""
        at = datetime.now(UTC)
        version = self._find()
        asked = Lookup(version, {}, at, self.opening.lookup, asked=True)
        if not self.opening.production:
            return asked
        policies = self.store.policies(version.name)
        signers = {each.origin: each.policy.signed_by for each in policies if each.policy.signed_by}
        return replace(asked, signers=signers, history=self.store.promotions(version, PRODUCTION))

    def _find(self) -> Version:
        """As `Registry.find`; the message names a folder that may have been meant."""
        try:
            return self.store.find(self.ref)
        except NotFoundError as error:
            if Path(str(self.ref)).is_dir():
                raise NotFoundError(
                    f"{error}; for the folder of that name write ./{self.ref}"
                ) from None
            raise

    def _read(self) -> Lookup | None:
        last = self._kept.read(str(self.ref))
        return None if last is None else replace(last, policy=self.opening.lookup)

    def _young(self) -> Lookup | None:
        try:
            last = self._read()
        except RegistryError as error:
            log.warning("%s: the registry is asked: %s", self.ref, str(error))
            return None
        age = None if last is None else (datetime.now(UTC) - last.at).total_seconds()
        return last if age is not None and 0 <= age < self.opening.max_age_s else None

    def _last(self) -> Lookup:
        last = self._read()
        if last is None:
            raise LoadError(
                f"{self.ref}: not known here for mode={self.opening.mode!r}, and lookup='offline' "
                f"asks nobody: load it once with lookup='prefer-cache' from {self.store!r}"
            )
        return last
