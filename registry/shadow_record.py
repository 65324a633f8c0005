"""The results of a shadow or a canary: a version that ran beside production."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from registry.bundle import Measured
from registry.errors import RegistryError
from soa.records import Record, read_record

_COUNTS = ("events", "dropped", "errors", "canary_calls", "production_calls", "withdrawals")


@dataclass(frozen=True, kw_only=True)
class ShadowRecord(Record):
    """Sums over all sessions in which a version ran beside production.

    `events` counts the compared events. `dropped` counts sampled events that
    were not compared, because the buffers for copies were full. `errors` counts failed runs of the
    shadow; `error` is the message of the last one.

    `canary_calls` counts the calls that the version answered as a canary, `production_calls` those
    that production answered meanwhile. `withdrawals` counts the sessions that withdrew the canary;
    `withdrawn` says when and why the last one did.

    `max_abs`, `max_rel`: the largest differences by output; `max_rel` is relative to the values of
    production. A NaN or an infinity on one side alone is an infinite difference.
    """

    version: str
    """The shadow, as `name/3`; `production` is the version in production, written likewise."""
    digest: str
    production: str
    production_digest: str
    events: int = 0
    dropped: int = 0
    errors: int = 0
    error: str = ""
    canary_calls: int = 0
    production_calls: int = 0
    withdrawals: int = 0
    withdrawn: str = ""
    max_abs: dict[str, Measured] = field(default_factory=dict)
    max_rel: dict[str, Measured] = field(default_factory=dict)

    def plus(self, others: Iterable[ShadowRecord]) -> ShadowRecord:
        """Return the total of this record and those of `others` that compare the same two bundles.

        Counts are added, and the larger difference of each output is kept. Of the messages the last
        one that is not empty is kept, in the order of `others`.
        """
        sums: dict[str, Any] = asdict(self)
        for other in others:
            if (other.digest, other.production_digest) == (self.digest, self.production_digest):
                for key in _COUNTS:
                    sums[key] += getattr(other, key)
                for key in ("error", "withdrawn"):
                    sums[key] = getattr(other, key) or sums[key]
                for key in ("max_abs", "max_rel"):
                    sums[key] = _maxima(sums[key], getattr(other, key))
        return ShadowRecord(**sums)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> ShadowRecord:
        """Read a record from JSON. Raises RegistryError, whose message begins with `where`."""
        try:
            return read_record(cls, text)
        except ValueError as error:
            raise RegistryError(f"{where}: not the record of a shadow: {error}") from error


def _maxima(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return the larger value of each name; a name that one mapping lacks has 0 there."""
    names = {**first, **second}  # not a set: a mapping keeps the order
    return {name: max(first.get(name, 0.0), second.get(name, 0.0)) for name in names}
