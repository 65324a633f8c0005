"""What a shadow has shown: a version that ran on some of production's events beside another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from registry.bundle import Measured
from registry.errors import RegistryError
from soa.records import Record, read_record


@dataclass(frozen=True, kw_only=True)
class ShadowRecord(Record):
    """Sums over sessions. `events` were compared; `dropped` ones were sampled while all room for
    copies was taken; `errors` are runs of the shadow that failed, with the last one's text.

    The largest differences are by output, relative ones to production's values. A NaN or an
    infinity on one side alone is an infinite difference.
    """

    version: str
    """As `name/3`, with its digest; likewise the one in production."""
    digest: str
    production: str
    production_digest: str
    events: int = 0
    dropped: int = 0
    errors: int = 0
    error: str = ""
    max_abs: dict[str, Measured] = field(default_factory=dict)
    max_rel: dict[str, Measured] = field(default_factory=dict)

    def plus(self, others: Iterable[ShadowRecord]) -> ShadowRecord:
        """Together with those of the same two bundles; others are left out."""
        found: dict[str, Any] = asdict(self)
        for other in others:
            if (other.digest, other.production_digest) == (self.digest, self.production_digest):
                for key in ("events", "dropped", "errors"):
                    found[key] += getattr(other, key)
                found["error"] = other.error or found["error"]
                for key in ("max_abs", "max_rel"):
                    found[key] = _largest(found[key], getattr(other, key))
        return ShadowRecord(**found)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> ShadowRecord:
        try:
            return read_record(cls, text)
        except ValueError as error:
            raise RegistryError(f"{where}: not the record of a shadow: {error}") from error


def _largest(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}
