"""Promotion: measure what the gates judge, here and now, then let them decide."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engines.target import Target
from pipeline.config import BuiltFrom, load_policy
from pipeline.promotion.measuring import Say, measure, open_to_measure
from registry.bundle import Bundle
from registry.errors import BundleError, NotFoundError, PromotionRefused, RegistryError
from registry.history import PREVIOUS, PRODUCTION, check_promotable
from registry.housekeeping import Imported, import_from
from registry.promotion import (
    Asked,
    Decision,
    Requirements,
    altered,
    check_override,
    decide,
    strictest,
)
from registry.promotion import override as overridden
from registry.shadow import ShadowRecord
from registry.store import Registry
from registry.version import Version
from soa.files import read_plain
from soa.options import known_options


@dataclass(frozen=True)
class Assessment:
    """Every gate's answer for a version, measured here and now."""

    version: Version
    decisions: tuple[Decision, ...]
    replaced: Version | None
    """The version that holds the alias, and was measured against."""
    policies: tuple[str, ...]
    annexes: tuple[str, ...] = ()
    """Targets built later that the gates saw too."""

    @property
    def passed(self) -> bool:
        return all(decision.lets_pass for decision in self.decisions)


@known_options()
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
    """Ask every gate, measuring on this host; move the alias if all let the version pass.

    The gates of the config that built the version (`max_slowdown` in place of its own), the
    registry's policies and the file `policy` count together: the strictest of each.
    `allow_unverified` excuses targets that no policy names. `override` names gates that may refuse
    without stopping the promotion, for `reason`, which stays in the history in any case. `shadows`:
    files of records that `load(shadow_record=...)` wrote; the registry has the others.
    Targets that were built later are judged too where this host runs them; the others wait for a
    promotion on a host of their kind.

    Raises PromotionRefused with all decisions; then nothing has changed but the history, which has
    the refusal. With `dry_run` nothing changes, and the answer may be that it would be refused.
    """
    check_promotable(alias)
    check_override(override, reason)
    version = registry.find(ref)
    try:
        replaced = registry.find(f"{version.name}@{alias}")
    except NotFoundError:
        replaced = None
    local = [] if policy is None else [load_policy(policy)]
    say(f"checking the digests of {version.ref}")
    try:
        opened = open_to_measure(registry, version)
    except BundleError as error:
        origins = tuple(asked.origin for asked in registry.policies(version.name))
        found = Assessment(version, (altered(str(error)),), replaced, origins)
    else:
        with tempfile.TemporaryDirectory(prefix="soa-policy-") as folder:
            asked = [*registry.policies(version.name, Path(folder)), *local]
            needed = requirements(opened.bundle, alias, max_slowdown, asked)
            seen = [_shadow_record(file, version, replaced) for file in shadows]
            judged = measure(
                registry,
                opened,
                version,
                replaced,
                needed,
                allow_unverified,
                seen if alias == PRODUCTION else None,
                say,
            )
        decisions = tuple(overridden(decide(judged), override, reason))
        annexes = tuple(opened.bundle.annexes)
        found = Assessment(version, decisions, replaced, needed.origins, annexes)
    if dry_run:
        return found
    promoted = registry.promote(
        version,
        alias,
        found.decisions,
        replacing=replaced.number if replaced else 0,
        policies=found.policies,
        annexes=found.annexes,
        reason=reason,
    )
    same = replaced is not None and replaced.number == promoted.number
    return replace(found, version=promoted, replaced=None if same else replaced)


def _shadow_record(file: Path, version: Version, replaced: Version | None) -> ShadowRecord:
    """One of this version beside the one in production; RegistryError."""
    try:
        found = ShadowRecord.from_json(read_plain(file, links=True), str(file))
    except OSError as error:
        raise RegistryError(f"{file}: cannot be read: {error.strerror}") from error
    wanted = (version.digest, replaced.digest if replaced else "")
    if (found.digest, found.production_digest) != wanted:
        beside = replaced.ref if replaced else "none"
        raise RegistryError(
            f"{file}: is of {found.version} beside {found.production}; needed is one of "
            f"{version.ref} beside the version in place, {beside}"
        )
    return found


def requirements(
    bundle: Bundle, alias: str, max_slowdown: float | None, policies: Sequence[Asked]
) -> Requirements:
    """What the version's config and all policies ask for together."""
    gates = BuiltFrom(bundle.manifest).gates
    targets = [*(gates.required_targets or bundle.manifest.targets), *bundle.annexes]
    return strictest(
        list(dict.fromkeys(str(Target.parse(name)) for name in targets)),
        gates.max_outside,
        gates.max_slowdown if max_slowdown is None else max_slowdown,
        policies,
        production=alias == PRODUCTION,
        own_reproducible=gates.reproducible,
    )


def import_with_aliases(
    registry: Registry,
    source: Path,
    name: str | None = None,
    say: Say = lambda text: None,
) -> tuple[Imported, dict[str, str], dict[str, PromotionRefused]]:
    """Import, then promote each version to the aliases that it had; `previous` follows from that.

    Returns what was imported; by alias, the version promoted; by alias, the refusal. A refusal
    stops nothing else. It is in the history, as any other.
    """
    imported = import_from(registry, source, name)
    promoted: dict[str, str] = {}
    refused: dict[str, PromotionRefused] = {}
    held = [
        (alias, number)
        for number, version in imported.export.versions.items()
        for alias in version.aliases
        if alias != PREVIOUS
    ]
    # `production` comes last, for a policy may ask for time in `staging`.
    for alias, number in sorted(held, key=lambda item: (item[0] == PRODUCTION, item)):
        ref = imported.versions[number].version.ref
        try:
            promoted[alias] = promote(registry, ref, alias, say=say).version.ref
        except PromotionRefused as error:
            refused[alias] = error
    return imported, promoted, refused
