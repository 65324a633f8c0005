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
    from runtime.opening.artifact import (
        copy_artifact,
        held_files,
        open_artifact,
        open_candidate,
        open_program,
    )
    from runtime.opening.choice import withheld
    from runtime.opening.names import Name
    from runtime.opening.records import LOOKUPS, LookupPolicy, Mode, Opened, Opening, Options
    from runtime.opening.route import name_of, open_found, open_here, open_version
    from runtime.opening.trust import require_promoted

_ROOMS = ("artifact", "records", "choice", "names", "trust", "route")  # the lightest first

__all__ = [
    "LOOKUPS",
    "Lookup",
    "LookupPolicy",
    "Mode",
    "Name",
    "Opened",
    "Opening",
    "Options",
    "copy_artifact",
    "held_files",
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
    if name not in __all__:
        raise AttributeError(f"module 'runtime.opening' has no attribute {name!r}")
    rooms = (import_module(f"runtime.opening.{room}") for room in _ROOMS)
    return next(getattr(room, name) for room in rooms if hasattr(room, name))
