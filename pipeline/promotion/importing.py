"""Import with aliases: they ask the gates of the registry that they come into, like any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.promotion.promoting import Promoted, promote
from registry.errors import PromotionRefused
from registry.history import PREVIOUS, PRODUCTION
from registry.housekeeping import Imported, import_from
from registry.store import Registry

Say = Callable[[str], None]


@dataclass(frozen=True)
class Transfer:
    """`promoted` and `refused`: by alias."""

    imported: Imported
    promoted: Mapping[str, Promoted]
    refused: Mapping[str, PromotionRefused]


def import_with_aliases(
    registry: Registry, source: Path, name: str | None = None, say: Say = lambda text: None
) -> Transfer:
    """Import, then promote each version to the aliases that it had; `previous` follows from that.

    A refusal stops nothing else. It is in the history, as any other.
    """
    imported = import_from(registry, source, name)
    promoted: dict[str, Promoted] = {}
    refused: dict[str, PromotionRefused] = {}
    for alias, number in _aliases(imported):
        version = imported.versions[number].version
        try:
            promoted[alias] = promote(registry, version.ref, alias, say=say)
        except PromotionRefused as error:
            refused[alias] = error
    return Transfer(imported, promoted, refused)


def _aliases(imported: Imported) -> Sequence[tuple[str, int]]:
    """`production` comes last, for a policy may ask for time in `staging`."""
    held = [
        (alias, number)
        for number, version in imported.export.versions.items()
        for alias in version.aliases
        if alias != PREVIOUS
    ]
    return sorted(held, key=lambda item: (item[0] == PRODUCTION, item))
