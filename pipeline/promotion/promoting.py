"""Promotion: measures on this host what the gates judge, lets them decide, and moves the alias."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engines.target import Target
from pipeline.config import BuiltFrom, load_policy
from pipeline.promotion.measuring import Say, measure, open_to_measure
from registry.bundle import Bundle
from registry.errors import BundleError, NotFoundError, RegistryError
from registry.history import PREVIOUS, PRODUCTION, check_promotable
from registry.housekeeping import Imported, import_from
from registry.promotion import (
    Decision,
    PromotionRefused,
    Requirements,
    SourcedPolicy,
    altered,
    check_override,
    decide,
    strictest,
)
from registry.promotion import override as overridden
from registry.shadow_record import ShadowRecord
from registry.store import Registry
from registry.version import Version
from soa.files import read_plain
from soa.options import FUNCTION, NUMBER, PATH, PATHS, TEXT, TEXTS, of_type, takes


@dataclass(frozen=True)
class Assessment:
    """The decisions of all gates for a version, from measurements on this host."""

    version: Version
    decisions: tuple[Decision, ...]
    replaced: Version | None
    """The version that had the alias and was compared with this one; None if there was none."""
    policies: tuple[str, ...]
    annexes: tuple[str, ...] = ()
    """The targets that were built later and were judged too."""

    @property
    def passed(self) -> bool:
        """True if every gate passed, or its refusal was overridden."""
        return all(decision.lets_pass for decision in self.decisions)


@takes(
    RegistryError,
    registry=of_type("a pipeline.Registry", Registry),
    ref=TEXT,
    alias=TEXT,
    allow_unverified=TEXTS,
    max_slowdown=NUMBER.or_none,
    shadows=PATHS,
    policy=PATH.or_none,
    override=TEXTS,
    reason=TEXT,
    say=FUNCTION,
)
def promote(
    registry: Registry,
    ref: str,
    alias: str,
    *,
    allow_unverified: frozenset[str] = frozenset(),
    max_slowdown: float | None = None,
    shadows: Sequence[Path] = (),
    policy: Path | None = None,
    override: frozenset[str] = frozenset(),
    reason: str = "",
    dry_run: bool = False,
    say: Say = lambda text: None,
) -> Assessment:
    """Measure on this host, ask every gate, and move the alias if the version passes all gates.

    The conditions come from the config that built the version, the registry's policies and the file
    `policy`; the strictest of each counts. `max_slowdown` replaces the value of the config.
    `allow_unverified`: targets that may be unverified, unless a policy names them. `override`:
    gates that may refuse without stopping the promotion. `reason` says why; it is kept in the
    history in any case. `shadows`: files that `load(shadow_record=...)` wrote, in addition to the
    records in the registry. Targets that were built later are judged too if this host runs them;
    the others need a promotion on a host of their kind.

    Raises PromotionRefused with all decisions; then only the history has changed: it records the
    refusal. With `dry_run` nothing changes, and the result says whether it would be refused.

    Examples
    --------
    >>> assessment = pipeline.promote(registry, "jet-tagger/4", "production", dry_run=True)
    >>> {decision.gate for decision in assessment.decisions} >= {"tolerance", "speed"}
    True
    >>> registry.find("jet-tagger@production").number  # it has not moved
    1
    """
    check_promotable(alias)
    check_override(override, reason)
    excused = frozenset(str(Target.parse(name)) for name in allow_unverified)
    version = registry.find(ref)
    replaced = _version_in_place(registry, version.name, alias)
    local = [] if policy is None else [load_policy(policy)]
    say(f"checking the digests of {version.ref}")
    try:
        opened = open_to_measure(registry, version)
    except BundleError as error:
        origins = tuple(policy.origin for policy in registry.policies(version.name))
        assessment = Assessment(version, (altered(str(error)),), replaced, origins)
    else:
        with tempfile.TemporaryDirectory(prefix="soa-policy-") as folder:
            policies = [*registry.policies(version.name, Path(folder)), *local]
            needed = join_requirements(opened.bundle, alias, max_slowdown, policies)
            from_files = [_read_shadow_record(file, version, replaced) for file in shadows]
            records = from_files if alias == PRODUCTION else None
            findings = measure(registry, opened, version, replaced, needed, excused, records, say)
        decisions = tuple(overridden(decide(findings), override, reason))
        annexes = tuple(opened.bundle.annexes)
        assessment = Assessment(version, decisions, replaced, needed.origins, annexes)
    if dry_run:
        return assessment
    promoted = registry.promote(
        version,
        alias,
        assessment.decisions,
        replacing=replaced.number if replaced else 0,
        policies=assessment.policies,
        annexes=assessment.annexes,
        reason=reason,
    )
    same = replaced is not None and replaced.number == promoted.number
    return replace(assessment, version=promoted, replaced=None if same else replaced)


def _version_in_place(registry: Registry, name: str, alias: str) -> Version | None:
    """Return the version of the model `name` that has the alias now; None if none has it."""
    try:
        return registry.find(f"{name}@{alias}")
    except NotFoundError:
        return None


def _read_shadow_record(file: Path, version: Version, replaced: Version | None) -> ShadowRecord:
    """Read the record of a shadow from a file.

    Raises RegistryError if it is not a record of `version` beside `replaced`, the one in place.
    """
    try:
        record = ShadowRecord.from_json(read_plain(file, links=True), str(file))
    except OSError as error:
        raise RegistryError(f"{file}: cannot be read: {error.strerror}") from error
    wanted = (version.digest, replaced.digest if replaced else "")
    if (record.digest, record.production_digest) != wanted:
        beside = replaced.ref if replaced else "none"
        raise RegistryError(
            f"{file}: {record.version} ran beside {record.production}; this promotion needs the "
            f"record of {version.ref} beside the version in place, {beside}"
        )
    return record


def join_requirements(
    bundle: Bundle, alias: str, max_slowdown: float | None, policies: Sequence[SourcedPolicy]
) -> Requirements:
    """Return the conditions of the version's config and of all policies together.

    `max_slowdown` replaces that of the config, unless it is None.
    """
    gates = BuiltFrom(bundle.manifest).gates
    targets = [*(gates.required_targets or bundle.manifest.targets), *bundle.annexes]
    return strictest(
        list(dict.fromkeys(str(Target.parse(name)) for name in targets)),
        gates.max_outside,
        gates.max_slowdown if max_slowdown is None else max_slowdown,
        policies,
        production=alias == PRODUCTION,
        own_reproducible=gates.reproducible,
        own_shown=gates.independence == "shown",
    )


@dataclass(frozen=True)
class ImportedAliases:
    """An import, and by alias either the version that was promoted to it or the refusal."""

    imported: Imported
    promoted: Mapping[str, str]
    refused: Mapping[str, PromotionRefused]


def import_with_aliases(
    registry: Registry, source: Path, name: str | None = None, say: Say = lambda text: None
) -> ImportedAliases:
    """Import versions, then promote each to the aliases that it had; this also sets `previous`.

    After a refusal the other aliases are still promoted. Like every refusal, it is recorded in the
    history.
    """
    imported = import_from(registry, source, name)
    promoted: dict[str, str] = {}
    refused: dict[str, PromotionRefused] = {}
    moves = [
        (alias == PRODUCTION, alias, number)
        for number, version in imported.export.versions.items()
        for alias in version.aliases
        if alias != PREVIOUS
    ]
    # `production` comes last, since a policy may require time in `staging` first.
    for _, alias, number in sorted(moves):
        ref = imported.versions[number].version.ref
        try:
            promoted[alias] = promote(registry, ref, alias, say=say).version.ref
        except PromotionRefused as error:
            refused[alias] = error
    return ImportedAliases(imported, promoted, refused)
