"""Import with aliases: they ask the gates of the registry that they come into, like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.promotion.promoting import promote
from registry.errors import PromotionRefused
from registry.history import PREVIOUS, PRODUCTION
from registry.housekeeping import Imported, import_from
from registry.store import Registry


def import_with_aliases(
    registry: Registry,
    source: Path,
    name: str | None = None,
    say: Callable[[str], None] = lambda text: None,
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
