"""An annex: the artifacts for one more target of a version, built after its bundle was sealed.

It is a sealed folder (with `SHA256SUMS`) that names the digest of its bundle; the bundle itself and
its digest do not change. An annex contains `annex.json`, one folder for each engine, and the
reports of its target. `registry.bundle.bundle.attach` joins a bundle and its annexes. The annex's
files then have names that begin with `annexes/<device>/<arch>/`, as in a pulled bundle and in
`annex.json`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self

from registry.bundle.digests import Sealed, open_sealed
from registry.bundle.manifest import (
    ModelName,
    Sha256,
    TargetName,
    TargetRecord,
    record_from_json,
    record_to_json,
)
from soa.records import Record, Within

ANNEXES = "annexes"
"""The subfolder of a pulled bundle for targets that were built later."""
ANNEX = "annex.json"
ANNEX_SCHEMA = 1
"""The newest annex.json that this code writes and reads."""


def prefix_of(target: str) -> str:
    """Return the beginning of the names that an annex's files have in their bundle."""
    return f"{ANNEXES}/{target}/"


@dataclass(frozen=True, kw_only=True)
class AnnexRecord(Record):
    """The content of `annex.json`: the target's record, and how it was built for which bundle."""

    schema_version: Annotated[int, Within(1)] = ANNEX_SCHEMA
    name: ModelName
    base: Sha256
    """The digest of the bundle from which the annex was built."""
    target: TargetName
    record: TargetRecord
    created: str
    """UTC, ISO 8601."""
    by: str
    tools: dict[str, str] = field(default_factory=dict)
    host: dict[str, str] = field(default_factory=dict)
    python: str
    notes: list[str] = field(default_factory=list)
    """Remarks in words that the reports do not contain."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.record.status != "verified":
            raise ValueError(f"an annex is of a verified target; {self.target} is not")

    def to_json(self) -> str:
        """Return the text of `annex.json`, see `record_to_json`."""
        return record_to_json(self)


@dataclass(frozen=True, kw_only=True)
class Annex(Sealed):
    """An opened annex: a sealed folder with the artifacts for one more target of a version."""

    record: AnnexRecord

    @property
    def target(self) -> str:
        """The target for which it was built."""
        return self.record.target

    @property
    def prefix(self) -> str:
        """The beginning of the names that its files have in the bundle, see `prefix_of`."""
        return prefix_of(self.target)

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Self:
        """Open an annex. Raises BundleError if the folder is not intact, like `Bundle.open`."""
        content, sealed = open_sealed(path, ANNEX, verify=verify)
        record = record_from_json(AnnexRecord, content, str(sealed.path / ANNEX), ANNEX_SCHEMA)
        return cls(record=record, **vars(sealed))
