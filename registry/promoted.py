"""The note that a pulled bundle carries: which promoted version it is a copy of.

It lies beside the sealed files and is the only file there that is not sealed, since promotion comes
after sealing. It names the bundle's digest, so it vouches for no other bundle. It is a record, not
a signature.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from registry.errors import BundleError

PROMOTED = "PROMOTED.json"


@dataclass(frozen=True)
class Promoted:
    """A promotion to production: of which version, with which digest, by whom and when (UTC)."""

    ref: str
    digest: str
    by: str
    at: str
    annexes: Mapping[str, str] = field(default_factory=dict)
    """Targets built later that were promoted too, and the digests of their annexes."""


def write_promoted(folder: Path, record: Promoted) -> None:
    (folder / PROMOTED).write_text(json.dumps(asdict(record), indent=1) + "\n")


def read_promoted(folder: Path) -> Promoted | None:
    """The note of a pulled bundle, or None; raises BundleError if it is there but unreadable."""
    path = folder / PROMOTED
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: cannot be read: {error}") from error
    try:
        return Promoted(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise BundleError(f"{path}: not the record of a promotion: {error}") from error
