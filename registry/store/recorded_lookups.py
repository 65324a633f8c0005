"""Records of earlier lookups, kept on this host for when the registry is not asked.

A record is written only after a lookup has passed all checks of its mode. In production these are:
the version was promoted, and it is signed as the registry's policies require. The record contains
the version with its promotion, and the keys of those policies, so that each later use can repeat
the checks. If the registry refuses a lookup, the record is removed.

The key of a record is registry, name and mode. Its sha256, in the record, detects damage but not
forgery: whoever can write to the cache could write there too. Against forgery, use signatures and
the trusted keys of the host.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from registry.errors import RegistryError
from registry.version import Promotion, Version
from soa.files import read_plain, write_whole
from soa.records import as_data, as_record, parse_json

_SCHEMA = 1


@dataclass(frozen=True)
class Lookup:
    """The version that a name means, and where this answer is from."""

    version: Version
    signers: Mapping[str, tuple[str, ...]]
    """The keys (PEM) of each policy, of which one must have signed, by the policy's origin."""
    at: datetime
    """The time of the registry's answer (UTC)."""
    policy: str = "offline"
    asked: bool = False
    """True if the registry was asked for this session."""
    stale: str | None = None
    """The reason why the registry could not be asked although it should have been."""
    history: Sequence[Promotion] | None = field(default=None, repr=False)
    """The version's promotions in the model's history, if that was read."""


class LookupCache:
    """The records of one registry and mode in the folder `root`, by name."""

    def __init__(self, root: Path, registry: str, mode: str) -> None:
        self._root = root / "resolved"
        self._key = {"registry": registry, "mode": mode}

    def read(self, ref: str) -> Lookup | None:
        """Read the record of a lookup of `ref`, or None. Raises RegistryError if it is damaged."""
        path = self._path(ref)
        try:
            return _parse_record(read_plain(path), ref)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise RegistryError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise RegistryError(
                f"{path}: damaged: {error}: remove it, or load with lookup='fresh'"
            ) from error

    def write(self, ref: str, lookup: Lookup) -> None:
        """Write the record of a lookup, unless there is a newer one. Raises OSError on failure."""
        with contextlib.suppress(RegistryError):  # a damaged record is replaced
            recorded = self.read(ref)
            if recorded is not None and recorded.at > lookup.at:
                return
        content = {
            "schema": _SCHEMA,
            **self._key,
            "ref": ref,
            "at": lookup.at.isoformat(),
            "version": as_data(lookup.version),
            "signers": [
                {"origin": origin, "keys": list(keys)} for origin, keys in lookup.signers.items()
            ],
        }
        path = self._path(ref)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"content": content, "sha256": _digest(content)}, indent=1)
        write_whole(path, text + "\n")

    def forget(self, ref: str) -> None:
        """Remove the record of `ref`, if there is one and this user may."""
        with contextlib.suppress(OSError):  # it does not exist, or belongs to another user
            self._path(ref).unlink()

    def _path(self, ref: str) -> Path:
        """Return the record's file. Its name is a digest, since a URI may have any character."""
        return self._root / f"{_digest({**self._key, 'ref': ref})}.json"


def _parse_record(text: bytes, ref: str) -> Lookup:
    """Read the lookup of `ref` from the text of a record. Raises ValueError if it is damaged."""
    record = as_record(dict[str, Any], parse_json(text))
    content = as_record(dict[str, Any], record.get("content"))
    if record.get("sha256") != _digest(content):
        raise ValueError("it is not what was written")
    if (content.get("schema"), content.get("ref")) != (_SCHEMA, ref):
        raise ValueError("it is of another kind")
    signers = as_record(list[dict[str, Any]], content.get("signers"))
    fields = {name: content.get(name) for name in ("version", "at")}
    fields["signers"] = {str(entry.get("origin")): entry.get("keys") for entry in signers}
    return as_record(Lookup, fields)


def _digest(content: Any) -> str:
    """Return the sha256 of JSON data, which does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
