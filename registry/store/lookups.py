"""What a name meant when the registry was last asked, kept on this host for when it is not.

A record is written only after a lookup has passed everything that its mode asks for: in production,
that a gate let the version pass and that it is signed as the registry's policies ask. It holds the
version as the registry knew it, with its promotion, and those policies' keys: whoever opens it
later checks the same again. Where the registry said no, the record is removed.

It is found by registry, name and mode; its own sha256 is in it against damage. Against forgery
there are signatures and a host's own keys: who may write to the cache could also write there.
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
from soa.records import as_record, parse_json

_SCHEMA = 1


@dataclass(frozen=True)
class Lookup:
    """Which version a name meant, and how that is known."""

    version: Version
    signers: Mapping[str, tuple[str, ...]]
    """By who asks for it: public keys in PEM format, one of which must have signed."""
    at: datetime
    """When the registry said so (UTC)."""
    policy: str = "offline"
    asked: bool = False
    """Whether it was asked for this session."""
    stale: str | None = None
    """Why it could not be asked, where it should have been."""
    history: Sequence[Promotion] | None = field(default=None, repr=False)
    """What the model's history says of the version's promotion, where it was asked."""


class LookupCache:
    """The records of one registry and mode in the folder `root`, by name."""

    def __init__(self, root: Path, registry: str, mode: str) -> None:
        self._root = root / "resolved"
        self._key = {"registry": registry, "mode": mode}

    def read(self, ref: str) -> Lookup | None:
        """None if there is none; RegistryError if it is damaged."""
        path = self._path(ref)
        try:
            kept = as_record(dict[str, Any], parse_json(read_plain(path)))
            content = as_record(dict[str, Any], kept.get("content"))
            if kept.get("sha256") != _digest(content):
                raise ValueError("it is not what was written")
            if (content.get("schema"), content.get("ref")) != (_SCHEMA, ref):
                raise ValueError("it is of another kind")
            signers = as_record(list[dict[str, Any]], content.get("signers"))
            said = {name: content.get(name) for name in ("version", "at")}
            said["signers"] = {str(each.get("origin")): each.get("keys") for each in signers}
            return as_record(Lookup, said)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise RegistryError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise RegistryError(
                f"{path}: damaged: {error}: remove it, or load with lookup='fresh'"
            ) from error

    def write(self, ref: str, found: Lookup) -> None:
        """Unless another process has found it later. OSError where the cache cannot be written."""
        with contextlib.suppress(RegistryError):
            last = self.read(ref)
            if last is not None and last.at > found.at:
                return
        content = {
            "schema": _SCHEMA,
            **self._key,
            "ref": ref,
            "at": found.at.isoformat(),
            "version": _plain(found.version),
            "signers": [{"origin": o, "keys": list(k)} for o, k in found.signers.items()],
        }
        path = self._path(ref)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"content": content, "sha256": _digest(content)}, indent=1)
        write_whole(path, text + "\n")

    def forget(self, ref: str) -> None:
        with contextlib.suppress(OSError):  # not there, or not ours to change
            self._path(ref).unlink()

    def _path(self, ref: str) -> Path:
        return self._root / f"{_digest({**self._key, 'ref': ref})}.json"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plain(version: Version) -> dict[str, Any]:
    found = {k: dict(v) if isinstance(v, Mapping) else v for k, v in vars(version).items()}
    return {**found, "created": version.created.isoformat()}
