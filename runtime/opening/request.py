"""What the caller asks for (`Opening`), and the version or folder that passed (`Opened`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from engines.target import Target
from registry.bundle import MOST_THREADS, Annex, Bundle
from runtime.errors import LoadError
from runtime.session import Origin
from soa.options import COUNT, FUNCTION, NUMBER, PATHS, REF, TEXT, check_fields
from soa.signature import Signature

if TYPE_CHECKING:  # opening a folder does not import the registry
    from registry.store import Lookup, Registry
    from registry.version import Version

Mode = Literal["test", "production"]
LookupPolicy = Literal["fresh", "prefer-cache", "offline"]
LOOKUPS: tuple[LookupPolicy, ...] = ("fresh", "prefer-cache", "offline")

Builder = Callable[[Bundle, Target], Annex]
"""Builds a bundle's program for a target, and validates it on the bundle's reference. Raises an
error if that fails."""

Prover = Callable[["Opened", str, str], str | None]
"""Returns why an artifact is refused on this host's device, or None if it is valid. Raises
LoadError if it cannot be validated on this host."""


class Options(TypedDict, total=False):
    """The fields of `Opening` except `ref` and `mode`, for type checks of `**options`."""

    registry: Registry | str | None
    lookup: LookupPolicy
    max_age_s: float
    trusted_keys: str | Path | Sequence[str | Path] | None
    target: str | None
    engine_name: str | None
    threads: int | None
    instances: int | None
    watch: float | None
    builder: Builder | None
    prover: Prover | None


_KINDS = {
    "ref": REF,
    "mode": TEXT,
    "lookup": TEXT,
    "max_age_s": NUMBER,
    "trusted_keys": PATHS.or_none,
    "target": TEXT.or_none,
    "engine_name": TEXT.or_none,
    "threads": COUNT.or_none,
    "instances": COUNT.or_none,
    "watch": NUMBER.or_none,
    "builder": FUNCTION.or_none,
    "prover": FUNCTION.or_none,
}


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What to open, and the rules for it. Raises LoadError for rules that contradict each other.

    `mode`: "test" takes any version. "production" takes a version only if a gate has promoted this
    model, number and digest, and if it has all required signatures. The host, each policy of the
    registry and `trusted_keys` may each list keys; one key of each list must have signed.

    `lookup`: "fresh" asks the registry what a name means, and fails if it cannot be asked.
    "prefer-cache" takes a result found on this host less than `max_age_s` ago. Else it asks; if
    that fails, it takes the last result, with a warning. "offline" takes the last result and opens
    no connection.

    `trusted_keys`: files of public keys, or folders of them. `target` and `engine_name` override
    the best target of this host and the engine chosen for it. `threads` and `instances` (how many
    runs may be active at once) override the values under `session` in the version's config.
    `watch`: the share of calls whose values are counted for `pipeline drift`, by default that of
    PIPELINE_WATCH, or none (docs/howto/drift.md).
    `builder` makes an artifact if the version has no verified one for this host. `prover` validates
    an artifact that no device of its kind has run, before its first use on this host; without a
    prover, production refuses such an artifact.

    Examples
    --------
    >>> pipeline.load("jet-tagger/4", mode="test", threads=1, lookup="prefer-cache").origin.version
    '4'
    """

    ref: str | Path = field(kw_only=False)
    mode: Mode = "production"
    registry: Registry | str | None = None
    lookup: LookupPolicy = "fresh"
    max_age_s: float = 300.0
    trusted_keys: str | Path | Sequence[str | Path] | None = None
    target: str | None = None
    engine_name: str | None = None
    threads: int | None = None
    instances: int | None = None
    watch: float | None = None
    builder: Builder | None = None
    prover: Prover | None = None

    def __post_init__(self) -> None:
        """Raise LoadError for a value that cannot be used."""
        check_fields(LoadError, "load", self, _KINDS)
        if self.mode not in ("test", "production"):
            raise LoadError(f"mode {self.mode!r} is neither 'test' nor 'production'")
        if self.lookup not in LOOKUPS:
            raise LoadError(f"lookup {self.lookup!r}: use one of {', '.join(map(repr, LOOKUPS))}")
        for name, count in (("threads", self.threads), ("instances", self.instances)):
            if count is not None and not 1 <= count <= MOST_THREADS:
                raise LoadError(f"{name}={count}: 1 to {MOST_THREADS} are possible")
        if self.watch is not None and not 0 <= self.watch <= 1:
            raise LoadError(f"watch={self.watch}: give the share of calls to count, from 0 to 1")

    @property
    def production(self) -> bool:
        return self.mode == "production"

    def store(self) -> Registry:
        """Return the registry to ask: the one given, or that of the URI given, or this host's."""
        from registry.store import Registry

        return self.registry if isinstance(self.registry, Registry) else Registry(self.registry)


@dataclass(frozen=True)
class Opened:
    """A version, or the bundle of a folder, that has passed every check of its mode.

    `bundle` has only the targets that may be used. `withheld`: by target, why it may not be used.
    """

    bundle: Bundle
    name: str
    """The model's name: in the registry, or in the note of a pulled folder."""
    number: int | None
    """The version's number; None for a folder that does not say it."""
    lookup: Lookup | None
    """How the version was found; None for a folder."""
    opening: Opening
    withheld: Mapping[str, str]

    @property
    def production(self) -> bool:
        return self.opening.production

    @property
    def version(self) -> Version | None:
        """The registry's description of the version; None for a folder."""
        return None if self.lookup is None else self.lookup.version

    @property
    def label(self) -> str:
        """Its name in messages: `name/3`, or only the model's name."""
        return self.name if self.number is None else f"{self.name}/{self.number}"

    @cached_property
    def signature(self) -> Signature:
        """The model's signature, as the manifest records it."""
        return Signature.from_dict(self.bundle.manifest.signature)

    @property
    def threads(self) -> int:
        """The number of threads of one run."""
        return self.opening.threads or self.bundle.manifest.session.threads

    def engines(self, target: str) -> list[str]:
        """Return the engines that a session of a target runs: the one asked for, or the chosen."""
        if self.opening.engine_name is not None:
            return [self.opening.engine_name]
        return self.bundle.manifest.targets[target].engines()

    def origin(self, target: str, engine: str) -> Origin:
        """Return the origin of a session of this version. `engine`: what runs it, as text."""
        number = None if self.number is None else str(self.number)
        return Origin(self.name, number, self.bundle.digest, target, engine, self.lookup)
