"""What the registry says about a version, and the tags in which it says it.

The tags are a contract with people: MLflow's web page shows them and its search finds them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING

from registry.errors import NotPromotedError, RegistryError
from registry.promotion import Decision
from registry.ref import TARGET_PATTERN
from registry.shadow import ShadowRecord
from soa.records import as_record, parse_json

if TYPE_CHECKING:
    from registry.mlflow import StoredVersion

DIGEST = "digest"
TARGET = "target."
CHOSEN = "chosen."
ANNEX = "annex."
PROMOTION = "promotion."
ROLLED_BACK = "rolled_back"
ORIGIN = "origin"
SHADOW = "shadow."


def tag_of(target: str) -> str:
    """`cpu/x86-64-v3` as part of a tag or metric: `cpu.x86-64-v3`."""
    return target.replace("/", ".")


def target_of(tag: str) -> str:
    """The inverse of `tag_of`: a target has one slash, after a device that has no dot."""
    return tag.replace(".", "/", 1)


@dataclass(frozen=True)
class Promotion:
    """The record of one promotion: who let the version pass, when, and by which decisions.

    For the version that `model`, `number` and `digest` name; old records have none of the three.
    """

    alias: str
    by: str
    at: str
    """UTC, ISO 8601, in whole seconds."""
    decisions: tuple[Decision, ...]
    annexes: Mapping[str, str] = field(default_factory=dict)
    """Targets built later that the gates saw too, and the digests of their annexes."""
    model: str | None = None
    number: int | None = None
    digest: str | None = None

    @property
    def time(self) -> datetime:
        return datetime.fromisoformat(self.at)

    def of(self, version: Version) -> Promotion:
        """The same promotion as one of `version`."""
        return replace(self, model=version.name, number=version.number, digest=version.digest)

    def to_json(self) -> str:
        said = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(said, sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, where: str) -> Promotion:
        try:
            made = as_record(cls, parse_json(text))
            if made.time.tzinfo is None:
                raise ValueError(f"its time {made.at!r} is in no time zone")
            return made
        except ValueError as error:
            raise RegistryError(f"{where}: not a record of a promotion: {error}") from error


@dataclass(frozen=True)
class Version:
    """One version, as the registry knew it when asked. Aliases may move later; the rest stays."""

    name: str
    number: int
    digest: str
    """Of the bundle: what `Bundle.digest` has to be."""
    aliases: tuple[str, ...]
    targets: Mapping[str, str]
    """Target to verified, unverified or failed."""
    chosen: Mapping[str, str]
    """Target to the engine that serves it."""
    annexes: Mapping[str, str]
    """Target to the digest of its annex, for what was built after the version was sealed."""
    created: datetime
    run_id: str | None
    source: str
    """URI of the bundle's folder in the artifact store."""
    tags: Mapping[str, str] = field(repr=False)

    @property
    def ref(self) -> str:
        return f"{self.name}/{self.number}"

    def __repr__(self) -> str:
        targets = [f"{t} {self.chosen.get(t, '')} {state}" for t, state in self.targets.items()]
        names = "".join(f" @{alias}" for alias in self.aliases)
        return f"Version({self.ref}{names}: {', '.join(targets)})"

    def promotion(self, alias: str) -> Promotion | None:
        """The last promotion to `alias`, or None if no gate ever let this version pass to it."""
        text = self.tags.get(PROMOTION + alias)
        if text is None:
            return None
        return Promotion.from_json(text, f"{self.ref}, tag {PROMOTION}{alias}")

    def let_in(self, alias: str, history: Sequence[Promotion] | None) -> Promotion:
        """The promotion that let this very version, by model, number and digest, pass to `alias`.

        `history`: its promotions in the model's history; None if the registry may not be asked. The
        tag counts if the history confirms it; else the history's last promotion counts.
        Raises NotPromotedError.
        """
        record = self.promotion(alias)
        if record is None:
            raise NotPromotedError(f"{self.ref} was never promoted to {alias}")
        meant = record.of(self)
        named = (record.model, record.number, record.digest)
        if named not in ((None, None, None), (meant.model, meant.number, meant.digest)):
            raise NotPromotedError(
                f"{self.ref}: its record of a promotion is that of {record.model}/{record.number} "
                f"(bundle {str(record.digest)[:12]}), so no gate let this one into {alias}"
            )
        if history is None:
            return meant
        known = [promotion for promotion in history if promotion == promotion.of(self)]
        if not known:
            raise NotPromotedError(
                f"{self.ref}: its tag says that it was promoted to {alias}, and the history of "
                f"{self.name} has no such promotion"
            )
        return meant if meant in known else known[-1]

    def promoted(self, record: Promotion) -> Version:
        """The version with this record of its promotion."""
        tags = {**self.tags, PROMOTION + record.alias: record.to_json()}
        return replace(self, tags=MappingProxyType(tags))

    @property
    def origin(self) -> Mapping[str, str]:
        """Where a version was before it was pushed or imported, by those who did; else empty."""
        text = self.tags.get(ORIGIN)
        try:
            return {} if text is None else as_record(dict[str, str], parse_json(text))
        except ValueError as error:
            raise RegistryError(f"{self.ref}, tag {ORIGIN}: not a record of ours") from error

    @property
    def shadows(self) -> dict[str, ShadowRecord]:
        """What it showed as a shadow, by tag: a record for each version that was in production."""
        return {
            key: ShadowRecord.from_json(text, f"{self.ref}, tag {key}")
            for key, text in self.tags.items()
            if key.startswith(SHADOW)
        }

    def require_free(self, target: str) -> None:
        """Raise RegistryError if the version has a target, proven there, already."""
        digest = self.annexes.get(target)
        if digest is not None:
            raise RegistryError(
                f"{self.ref} has {target} already: built later, annex {digest[:12]}…, and what "
                "was built stays as it is"
            )
        if self.targets.get(target) == "verified":
            raise RegistryError(f"{self.ref} has {target} already, verified in its bundle")

    @classmethod
    def of(cls, found: StoredVersion, aliases: Mapping[str, int]) -> Version:
        """`aliases`: those of the model."""
        number, tags = found.number, dict(found.tags)
        if DIGEST not in tags:
            raise RegistryError(
                f"{found.name}/{number} was not registered by soa-pipeline: no tag '{DIGEST}'"
            )
        return cls(
            name=found.name,
            number=number,
            digest=tags[DIGEST],
            aliases=tuple(sorted(alias for alias, to in aliases.items() if to == number)),
            targets=_by_target(tags, TARGET),
            chosen=_by_target(tags, CHOSEN),
            annexes=_by_target(tags, ANNEX),
            created=datetime.fromtimestamp(found.created / 1000, UTC),
            run_id=found.run_id or None,
            source=found.source,
            tags=MappingProxyType(tags),
        )


def _by_target(tags: Mapping[str, str], prefix: str) -> Mapping[str, str]:
    """A tag of that prefix that names no target is none of ours, and a target is also a path."""
    found = {
        target_of(key.removeprefix(prefix)): value
        for key, value in sorted(tags.items())
        if key.startswith(prefix)
    }
    known = {
        target: value for target, value in found.items() if re.fullmatch(TARGET_PATTERN, target)
    }
    return MappingProxyType(known)
