"""Opening: the one route from a reference to an artifact that runs.

    opened = open_version(Opening("jets@production"))    # looked up, promoted, trusted
    executable, target, engine = open_here(opened, opening, device)    # chosen, opened as hashed

Names are resolved on first use: a process that only validates imports no registry.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from registry.resolved import Lookup
    from runtime.opening.artifact import copy_artifact, open_artifact, open_candidate, open_program
    from runtime.opening.choice import withheld
    from runtime.opening.names import Name
    from runtime.opening.records import (
        LOOKUPS,
        Builder,
        LookupPolicy,
        Mode,
        Opened,
        Opening,
        Options,
    )
    from runtime.opening.route import name_of, open_found, open_here, open_version
    from runtime.opening.trust import require_promoted

_HOME = {
    "artifact": ("copy_artifact", "open_artifact", "open_candidate", "open_program"),
    "choice": ("withheld",),
    "names": ("Name",),
    "records": (
        "LOOKUPS",
        "Builder",
        "Lookup",
        "LookupPolicy",
        "Mode",
        "Opened",
        "Opening",
        "Options",
    ),
    "route": ("name_of", "open_found", "open_here", "open_version"),
    "trust": ("require_promoted",),
}

__all__ = [
    "LOOKUPS",
    "Builder",
    "Lookup",
    "LookupPolicy",
    "Mode",
    "Name",
    "Opened",
    "Opening",
    "Options",
    "copy_artifact",
    "name_of",
    "open_artifact",
    "open_candidate",
    "open_found",
    "open_here",
    "open_program",
    "open_version",
    "require_promoted",
    "withheld",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"runtime.opening.{home}"), name)
    raise AttributeError(f"module 'runtime.opening' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
