"""The note in a pulled bundle: the promoted version of which it is a copy.

The note is in the same folder as the sealed files, but the seal does not cover it, since promotion
comes after sealing. It contains the bundle's digest, so it is valid for no other bundle. It is a
record, not a signature.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from registry.errors import BundleError
from soa.files import read_plain
from soa.records import read_record

PROMOTED = "PROMOTED.json"


@dataclass(frozen=True)
class PulledNote:
    """A promotion to production: the version, its digest, who promoted it, and when (UTC)."""

    ref: str
    digest: str
    by: str
    at: str
    annexes: Mapping[str, str] = field(default_factory=dict)
    """The digests of the annexes that were promoted too, by the targets that were built later."""
    __closed__ = True


def write_note(folder: Path, record: PulledNote) -> None:
    """Write the note into the folder of a bundle, replacing an old one."""
    (folder / PROMOTED).write_text(json.dumps(asdict(record), indent=1) + "\n")


def read_note(folder: Path) -> PulledNote | None:
    """Read the note of a pulled bundle; None if it has none. Raises BundleError if unreadable."""
    path = folder / PROMOTED
    try:
        return read_record(PulledNote, read_plain(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BundleError(f"{path}: not the record of a promotion: {error}") from error
