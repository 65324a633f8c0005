"""An annex: the artifacts for one more target of a version, built after its bundle was sealed.

It is a sealed folder (with `SHA256SUMS`) that names the digest of its bundle; the bundle itself and
its digest do not change. An annex contains `annex.json`, one folder for each engine, and the
reports of its target. `attach` joins a bundle and its annexes. The annex's files then have names
that begin with `annexes/<device>/<arch>/`, as in a pulled bundle and in `annex.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Self

from registry.bundle.bundle import ANNEXES, Bundle
from registry.bundle.card import require_cards
from registry.bundle.digests import Sealed, open_sealed
from registry.bundle.manifest import (
    ModelName,
    Sha256,
    TargetName,
    TargetRecord,
    record_from_json,
    record_to_json,
)
from registry.errors import BundleError
from soa.records import Record, Within

ANNEX = "annex.json"
ANNEX_SCHEMA = 1
"""The newest annex.json that this code writes and reads."""


def prefix_of(target: str) -> str:
    """The beginning of the names of an attached annex's files."""
    return f"{ANNEXES}/{target}/"


@dataclass(frozen=True, kw_only=True)
class AnnexRecord(Record):
    """`annex.json`."""

    schema_version: Annotated[int, Within(1)] = ANNEX_SCHEMA
    name: ModelName
    base: Sha256
    """The digest of the bundle that this was built from."""
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
        return record_to_json(self)


@dataclass(frozen=True, kw_only=True)
class Annex(Sealed):
    """An opened annex."""

    record: AnnexRecord

    @property
    def target(self) -> str:
        return self.record.target

    @property
    def prefix(self) -> str:
        return prefix_of(self.target)

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Self:
        """Like `Bundle.open`: raises BundleError if the folder is not intact."""
        content, sealed = open_sealed(path, ANNEX, verify=verify)
        record = record_from_json(AnnexRecord, content, str(sealed["path"] / ANNEX), ANNEX_SCHEMA)
        return cls(record=record, **sealed)


def attach(bundle: Bundle, annexes: Iterable[Annex]) -> Bundle:
    """Return the bundle with its annexes: one manifest, one set of files. Nothing is written.

    Raises BundleError if an annex belongs to another bundle, if two annexes have the same target,
    or if the bundle itself has that target verified.
    """
    targets, files = dict(bundle.manifest.targets), dict(bundle.files)
    known, hashed, holds = dict(bundle.annexes), dict(bundle.hashed), bundle.holds
    portable = (bundle.manifest.program, bundle.manifest.torchscript)
    for annex in annexes:
        record = annex.record
        if record.base != bundle.digest or record.name != bundle.manifest.name:
            raise BundleError(
                f"{annex.path}: belongs to another bundle ({record.name}, {record.base[:12]}…) "
                f"than {bundle.path} ({bundle.manifest.name}, {bundle.digest[:12]}…)"
            )
        there = targets.get(annex.target)
        if annex.target in known or (there is not None and there.status == "verified"):
            raise BundleError(f"{annex.path}: {bundle.path} has {annex.target} already, verified")
        files |= {f"{annex.prefix}{name}": digest for name, digest in annex.files.items()}
        hashed |= {f"{annex.prefix}{name}": was for name, was in annex.hashed.items()}
        for engine, candidate in record.record.candidates.items():
            for name in candidate.files:
                own = name.startswith(annex.prefix) or name in portable
                if name not in files or not own:
                    raise BundleError(
                        f"{annex.path}: {ANNEX} names {name} ({engine}), which is not there"
                    )
        require_cards(
            annex.path, annex.files, bundle.manifest.signature, record.record, annex.prefix
        )
        targets[annex.target], known[annex.target] = record.record, annex
        holds += annex.holds
    return replace(
        bundle,
        manifest=replace(bundle.manifest, targets=targets),
        files=MappingProxyType(files),
        annexes=MappingProxyType(known),
        hashed=MappingProxyType(hashed),
        holds=holds,
    )


def open_folder(
    path: str | Path, *, verify: bool = True, only: Mapping[str, str] | None = None
) -> Bundle:
    """Open the bundle in a folder with the annexes in the same folder.

    `only`: digests by target; just these annexes are taken, and all must exist. None: all annexes.
    """
    bundle = Bundle.open(path, verify=verify)
    root = bundle.path / ANNEXES
    found: dict[str, Path] = {}
    if root.exists() and not root.is_dir():
        raise BundleError(f"{bundle.path}: {ANNEXES} is not a folder")
    for device in sorted(root.iterdir()) if root.exists() else ():
        for place in sorted(device.iterdir()) if device.is_dir() else [device]:
            if not place.is_dir() or place == device:
                name = place.relative_to(bundle.path).as_posix()
                raise BundleError(f"{bundle.path}: {name} is not an annex")
            found[place.relative_to(root).as_posix()] = place
    if only is not None and (missing := sorted(only.keys() - found.keys())):
        raise BundleError(
            f"{bundle.path}: {prefix_of(missing[0])} is missing", code="bundle-altered"
        )
    annexes = []
    for target, place in found.items():
        if only is not None and target not in only:
            continue
        annexes.append(annex := Annex.open(place, verify=verify))
        if annex.target != target:
            raise BundleError(f"{place}: is the annex of {annex.target}")
        if only is not None and annex.digest != only[target]:
            raise BundleError(
                f"{place}: another annex ({annex.digest[:12]}…) than the promoted one "
                f"({only[target][:12]}…)",
                code="bundle-altered",
            )
    return attach(bundle, annexes)
