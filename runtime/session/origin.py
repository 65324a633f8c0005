"""Origin: the version and the artifact that a session runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from registry.store import Lookup


@dataclass(frozen=True)
class Origin:
    """What a session runs: for messages and records.

    Examples
    --------
    >>> print(session.origin)
    jet-tagger/1 (exported, cpu/x86-64-v...)
    """

    name: str
    version: str | None
    digest: str | None
    target: str
    engine: str
    lookup: Lookup | None = None
    """How the version was looked up; None for a folder."""

    def __str__(self) -> str:
        version = f"/{self.version}" if self.version else ""
        return f"{self.name}{version} ({self.engine}, {self.target})"
