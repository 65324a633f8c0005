"""The registry's information about a version, and the names of the tags that hold it.

People rely on these tags: MLflow's web page shows them and its search finds them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import Protocol

from registry import stamp
from registry.errors import NotPromotedError, RegistryError
from registry.promotion import Decision
from registry.ref import TARGET_PATTERN
from registry.shadow_record import ShadowRecord
from soa.records import as_record, parse_json
from soa.text import html_table

DIGEST = "digest"
TARGET = "target."
CHOSEN = "chosen."
ANNEX = "annex."
PROMOTION = "promotion."
ROLLED_BACK = "rolled_back"
ORIGIN = "origin"
SHADOW = "shadow."


def tag_of(target: str) -> str:
    """Write a target as part of a tag or metric: `cpu/x86-64-v3` gives `cpu.x86-64-v3`."""
    return target.replace("/", ".")


@dataclass(frozen=True)
class Promotion:
    """The record of one promotion: who promoted the version, when, and the decisions of the gates.

    `model`, `number` and `digest` name the version; old records have none of the three.
    """

    alias: str
    by: str
    at: str
    """UTC, ISO 8601, in whole seconds."""
    decisions: tuple[Decision, ...]
    annexes: Mapping[str, str] = field(default_factory=dict)
    """The digests of the annexes that the gates saw too, by the targets that were built later."""
    model: str | None = None
    number: int | None = None
    digest: str | None = None

    @property
    def time(self) -> datetime:
        """The time of the promotion, in whole seconds. In a valid record it has a time zone."""
        return datetime.fromisoformat(self.at)

    def of(self, version: Version) -> Promotion:
        """Return a copy of the record that names `version`, by model, number and digest."""
        return replace(self, model=version.name, number=version.number, digest=version.digest)

    def to_json(self) -> str:
        """Return the record as the text of the version's tag. Fields that are None are left out."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(fields, sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, where: str) -> Promotion:
        """Read the text of a tag. Raises RegistryError, whose message begins with `where`."""
        try:
            record = as_record(cls, parse_json(text))
            if record.time.tzinfo is None:
                raise ValueError(f"its time {record.at!r} has no time zone")
            return record
        except ValueError as error:
            raise RegistryError(f"{where}: not a record of a promotion: {error}") from error


class Stored(Protocol):
    """A version as MLflow's store describes it. `created`: in milliseconds since 1970, UTC."""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def created(self) -> int: ...
    @property
    def run_id(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def tags(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Version:
    """One version, as the registry described it when asked. Aliases and tags may change later."""

    name: str
    number: int
    digest: str
    """The digest that the version's bundle must have, see `Bundle.digest`."""
    aliases: tuple[str, ...]
    targets: Mapping[str, str]
    """The status of each target, see `TargetRecord.status`."""
    chosen: Mapping[str, str]
    """The engine that runs each target."""
    annexes: Mapping[str, str]
    """The digest of the annex of each target that was built after the version was sealed."""
    created: datetime
    run_id: str | None
    source: str
    """The URI of the bundle's folder in the artifact store."""
    tags: Mapping[str, str] = field(repr=False)

    @property
    def ref(self) -> str:
        """Its name in the registry, such as `jet-tagger/3`."""
        return f"{self.name}/{self.number}"

    def __repr__(self) -> str:
        targets = [
            f"{target} {self.chosen.get(target, '')} {status}"
            for target, status in self.targets.items()
        ]
        names = "".join(f" @{alias}" for alias in self.aliases)
        return f"Version({self.ref}{names}: {', '.join(targets)})"

    def _repr_html_(self) -> str:
        """Return HTML with the version and its targets, for a notebook; all text is escaped."""
        names = "".join(f" @{alias}" for alias in self.aliases)
        rows = [
            (target, self.chosen.get(target, ""), status) for target, status in self.targets.items()
        ]
        return html_table(f"Version {self.ref}{names}", ("target", "engine", "status"), rows)

    def promotion(self, alias: str) -> Promotion | None:
        """Return the promotion to `alias` in the version's tag, or None if there is no such tag.

        Examples
        --------
        >>> registry.find("jet-tagger/1").promotion("production").number
        1
        >>> registry.find("jet-tagger/2").promotion("production") is None
        True
        """
        text = self.tags.get(PROMOTION + alias)
        if text is None:
            return None
        return Promotion.from_json(text, f"{self.ref}, tag {PROMOTION}{alias}")

    def let_in(self, alias: str, history: Sequence[Promotion] | None) -> Promotion:
        """Return the promotion to `alias` of exactly this version: same model, number and digest.

        `history`: the version's promotions in the model's history; None if the registry may not be
        asked, so that the tag alone counts. With a history, the tag's promotion is returned if the
        history has it too, else the last promotion in the history. Raises NotPromotedError if the
        tag or the history has no promotion of this version.
        """
        record = self.promotion(alias)
        if record is None:
            raise NotPromotedError(f"{self.ref} was never promoted to {alias}")
        named = (record.model, record.number, record.digest)
        # Older releases wrote a record without these three names.
        if named not in ((None, None, None), (self.name, self.number, self.digest)):
            raise NotPromotedError(
                f"{self.ref}: its record of a promotion is that of {record.model}/{record.number} "
                f"(bundle {str(record.digest)[:12]}), so no gate let this one into {alias}"
            )
        tagged = record.of(self)
        if history is None:
            return tagged
        recorded = [promotion for promotion in history if promotion == promotion.of(self)]
        if not recorded:
            raise NotPromotedError(
                f"{self.ref}: its tag says that it was promoted to {alias}, and the history of "
                f"{self.name} has no such promotion"
            )
        return tagged if tagged in recorded else recorded[-1]

    def promoted(self, record: Promotion) -> Version:
        """Return a copy of the version whose tags contain `record`."""
        tags = {**self.tags, PROMOTION + record.alias: record.to_json()}
        return replace(self, tags=MappingProxyType(tags))

    @property
    def origin(self) -> Mapping[str, str]:
        """The version's origin, as written by the user who pushed or imported it; else empty."""
        text = self.tags.get(ORIGIN)
        try:
            return {} if text is None else as_record(dict[str, str], parse_json(text))
        except ValueError as error:
            raise RegistryError(f"{self.ref}, tag {ORIGIN}: not a record of ours") from error

    @property
    def shadows(self) -> dict[str, ShadowRecord]:
        """The version's results as a shadow, by tag.

        There is a record for each version beside which it ran in production.
        """
        return {
            key: ShadowRecord.from_json(text, f"{self.ref}, tag {key}")
            for key, text in self.tags.items()
            if key.startswith(SHADOW)
        }

    def require_free(self, target: str) -> None:
        """Raise RegistryError if the version already has `target` verified or as an annex."""
        digest = self.annexes.get(target)
        if digest is not None:
            raise RegistryError(
                f"{self.ref} has {target} already: built later, annex {digest[:12]}…, and what "
                "was built stays as it is"
            )
        if self.targets.get(target) == "verified":
            raise RegistryError(f"{self.ref} has {target} already, verified in its bundle")

    @classmethod
    def of(cls, found: Stored, aliases: Mapping[str, int]) -> Version:
        """Return the version that MLflow's store has `found`. `aliases`: all those of its model.

        Raises RegistryError if soa-pipeline did not register the version.
        """
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
            created=stamp.time_of(found.created),
            run_id=found.run_id or None,
            source=found.source,
            tags=MappingProxyType(tags),
        )


def _by_target(tags: Mapping[str, str], prefix: str) -> Mapping[str, str]:
    """Return the values of the tags that are `prefix` and a target, by target.

    Tags that name no valid target are left out: they are not ours, and their names might be unsafe
    paths.
    """
    by_target = {}
    for key in sorted(tags):
        # A target has one slash, after a device that has no dot: `tag_of` wrote a dot for it.
        target = key.removeprefix(prefix).replace(".", "/", 1)
        if key.startswith(prefix) and re.fullmatch(TARGET_PATTERN, target):
            by_target[target] = tags[key]
    return MappingProxyType(by_target)
