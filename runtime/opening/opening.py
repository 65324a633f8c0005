"""What is asked for (`Opening`), and the version or folder that has passed (`Opened`)."""

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
from soa.signature import Signature

if TYPE_CHECKING:  # opening a folder asks no registry
    from registry.store import Lookup, Registry
    from registry.version import Version

Mode = Literal["test", "production"]
LookupPolicy = Literal["fresh", "prefer-cache", "offline"]
LOOKUPS: tuple[LookupPolicy, ...] = ("fresh", "prefer-cache", "offline")

Builder = Callable[[Bundle, Target], Annex]
"""Builds a bundle's program for a target, proven against the bundle's reference; or raises."""


Prover = Callable[["Opened", str, str], str | None]
"""Why an engine's artifact for a target is refused on this host's own device; None: it is right.
LoadError where that cannot be found out here."""


class Options(TypedDict, total=False):
    """The fields of `Opening` but its mode, for type checkers, where they come as `**options`."""

    registry: Registry | str | None
    lookup: LookupPolicy
    max_age_s: float
    trusted_keys: str | Path | Sequence[str | Path] | None
    target: str | None
    engine_name: str | None
    threads: int | None
    instances: int | None
    builder: Builder | None
    prover: Prover | None


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What to open, and by which rules. Raises LoadError for rules that contradict each other.

    `mode` says what must have passed: "production" takes only what a gate let into production, for
    this model, number and digest, and what is signed as the host, the registry's policies and
    `trusted_keys` ask, each by one of its own keys; "test" takes anything.

    `lookup`: "fresh" asks the registry what a name means, and fails where it cannot be asked.
    "prefer-cache" takes what was found on this host less than `max_age_s` ago; else it asks, and
    where that fails it takes what was found last, with a warning. "offline" takes what was found
    last and opens no connection.

    `trusted_keys`: files of public keys, or folders of them. `target` and `engine_name` override
    the best target of this host and the engine that was chosen for it; `threads` and `instances`
    (how many runs there may be at one moment) what the version's config says under `session`.
    `builder` makes an artifact if the version holds no verified one for this host. `prover`
    validates an artifact that no device of its kind has run, before its first use on this host;
    without a prover, production refuses it.
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
    builder: Builder | None = None
    prover: Prover | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("test", "production"):
            raise LoadError(f"mode {self.mode!r} is neither 'test' nor 'production'")
        if self.lookup not in LOOKUPS:
            raise LoadError(f"lookup {self.lookup!r}: use one of {', '.join(map(repr, LOOKUPS))}")
        for name, count in (("threads", self.threads), ("instances", self.instances)):
            if count is not None and not 1 <= count <= MOST_THREADS:
                raise LoadError(f"{name}={count}: 1 to {MOST_THREADS} are possible")

    @property
    def production(self) -> bool:
        return self.mode == "production"

    def store(self) -> Registry:
        from registry.store import Registry

        return self.registry if isinstance(self.registry, Registry) else Registry(self.registry)


@dataclass(frozen=True)
class Opened:
    """A version, or the bundle of a folder, that has passed every check its mode asks for.

    `bundle` has the targets that may be used and no others; `withheld`
    says why the version's other targets may not.
    """

    bundle: Bundle
    name: str
    """The model's: the registry's name for it, or that of a pulled folder's note."""
    number: int | None
    """None for a folder that does not say which version it is."""
    lookup: Lookup | None
    """How the version was found; None for a folder."""
    opening: Opening
    withheld: Mapping[str, str]

    @property
    def production(self) -> bool:
        return self.opening.production

    @property
    def version(self) -> Version | None:
        return None if self.lookup is None else self.lookup.version

    @property
    def label(self) -> str:
        return self.name if self.number is None else f"{self.name}/{self.number}"

    @cached_property
    def signature(self) -> Signature:
        return Signature.from_dict(self.bundle.manifest.signature)

    @property
    def threads(self) -> int:
        """That one run may use."""
        return self.opening.threads or self.bundle.manifest.session.threads

    def origin(self, target: str, engine: str) -> Origin:
        number = None if self.number is None else str(self.number)
        return Origin(self.name, number, self.bundle.digest, target, engine, self.lookup)
