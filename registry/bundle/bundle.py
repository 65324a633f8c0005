"""A bundle: the folder with all files of one model version. It is never changed.

Its seal (digests.py) lists the files that belong to it; the bundle's digest is that of the seal.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from registry.bundle.annex import ANNEX, ANNEXES, Annex, prefix_of
from registry.bundle.card import require_cards
from registry.bundle.digests import MANIFEST, SIGNATURE, Sealed, open_sealed, read_sealed
from registry.bundle.manifest import Manifest
from registry.errors import BundleError
from soa.records import as_record, parse_json

VALIDATION = "reports/validation.json"
BENCHMARK = "reports/benchmark.json"
CURVES = "reports/metrics.json"
"""Bundles of release 1.0 have none."""


@dataclass(frozen=True, kw_only=True)
class Bundle(Sealed):
    """An opened bundle.

    With annexes (`attach`), the targets of the manifest, the files and the reports include those of
    the annexes. `digest` is always that of the bundle alone.
    """

    manifest: Manifest
    annexes: Mapping[str, Annex] = field(default_factory=dict, repr=False)
    """The attached annexes by target."""

    def __repr__(self) -> str:
        manifest = self.manifest
        targets = [
            f"{target} {record.choice()} {record.status}"
            for target, record in manifest.targets.items()
        ]
        return f"Bundle({manifest.name} {self.digest[:12]} in {self.path}: {', '.join(targets)})"

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Self:
        """Open a bundle. Raises a BundleError that names the file if it is not intact.

        The structure and the manifest are always checked; `verify=False` leaves out only the
        digests of the other files and the cards of the artifacts. With `verify=True` every file is
        read once, a card twice. Annexes in the folder are ignored; `open_folder` opens them too.
        """
        content, sealed = open_sealed(path, MANIFEST, aside=(ANNEXES,), verify=verify)
        root = sealed.path
        manifest = Manifest.from_json(content, where=str(root / MANIFEST))
        for name, where in manifest.files().items():
            if name not in sealed.files:
                raise BundleError(f"{root}: {MANIFEST} names {name} ({where}), which is not there")
        if verify:
            for record in manifest.targets.values():
                require_cards(root, sealed.files, manifest.signature, record)
        return cls(manifest=manifest, **vars(sealed))

    def verify(self) -> None:
        """Do what `Sealed.verify` does, for the bundle and for its annexes."""
        super().verify()
        for annex in self.annexes.values():
            annex.verify()

    def file(self, name: str) -> Path:
        """Return the path of a file of the bundle or an annex. `name`: relative to the bundle."""
        folder, name_there = self.place(name)
        return folder / name_there

    def place(self, name: str) -> tuple[Path, str]:
        """Return the folder that contains a file, the bundle's or an annex's, and its name there.

        Raises BundleError if there is no such file.
        """
        if name not in self.files:
            raise BundleError(f"{self.path}: the bundle has no file {name!r}")
        for annex in self.annexes.values():
            if name.startswith(annex.prefix):
                return annex.path, name.removeprefix(annex.prefix)
        return self.path, name

    def signature(self) -> bytes | None:
        """Return the content of the signature file (see registry/trust), or None if unsigned."""
        return read_sealed(self.path, SIGNATURE) if os.path.lexists(self.path / SIGNATURE) else None

    def report(self, name: str) -> dict[str, Any]:
        """Return the report VALIDATION, BENCHMARK or CURVES, by target; empty if there is none.

        For the target of an annex, the report in the annex is taken.
        """
        report: dict[str, Any] = {}
        for sealed in (self, *self.annexes.values()):
            if name in sealed.files:
                try:
                    content = parse_json(read_sealed(sealed.path, name))
                    report |= as_record(dict[str, Any], content)
                except ValueError as error:
                    raise BundleError(
                        f"{sealed.path / name}: not a JSON object: {error}"
                    ) from error
        return report


def attach(bundle: Bundle, annexes: Iterable[Annex]) -> Bundle:
    """Return the bundle with its annexes: one manifest, one set of files. Nothing is written.

    Raises BundleError if an annex belongs to another bundle, if two annexes have the same target,
    or if the bundle itself has that target verified.
    """
    targets, files = dict(bundle.manifest.targets), dict(bundle.files)
    attached, hashed, holds = dict(bundle.annexes), dict(bundle.hashed), bundle.holds
    for annex in annexes:
        _require_base(bundle, annex)
        existing = targets.get(annex.target)
        if annex.target in attached or (existing is not None and existing.status == "verified"):
            raise BundleError(f"{annex.path}: {bundle.path} has {annex.target} already, verified")
        files |= {f"{annex.prefix}{name}": digest for name, digest in annex.files.items()}
        hashed |= {f"{annex.prefix}{name}": identity for name, identity in annex.hashed.items()}
        _require_artifacts(bundle, annex, files)
        targets[annex.target], attached[annex.target] = annex.record.record, annex
        holds += annex.holds
    return replace(
        bundle,
        manifest=replace(bundle.manifest, targets=targets),
        files=MappingProxyType(files),
        annexes=MappingProxyType(attached),
        hashed=MappingProxyType(hashed),
        holds=holds,
    )


def _require_base(bundle: Bundle, annex: Annex) -> None:
    """Raise BundleError if an annex belongs to another bundle."""
    record = annex.record
    if record.base != bundle.digest or record.name != bundle.manifest.name:
        raise BundleError(
            f"{annex.path}: belongs to another bundle ({record.name}, {record.base[:12]}…) "
            f"than {bundle.path} ({bundle.manifest.name}, {bundle.digest[:12]}…)"
        )


def _require_artifacts(bundle: Bundle, annex: Annex, files: Mapping[str, str]) -> None:
    """Raise BundleError if the record of an annex names an artifact that it must not name.

    An artifact must be among `files`, be the annex's own or a portable program of the bundle, and
    have the card of its record.
    """
    record = annex.record.record
    portable = (bundle.manifest.program, bundle.manifest.torchscript)
    for engine, candidate in record.candidates.items():
        for name in candidate.files:
            allowed = name.startswith(annex.prefix) or name in portable
            if name not in files or not allowed:
                raise BundleError(
                    f"{annex.path}: {ANNEX} names {name} ({engine}), which is not there"
                )
    require_cards(annex.path, annex.files, bundle.manifest.signature, record, annex.prefix)


def open_folder(
    path: str | Path, *, verify: bool = True, only: Mapping[str, str] | None = None
) -> Bundle:
    """Open the bundle in a folder with the annexes in the same folder.

    `only`: digests by target; just these annexes are taken, and all must exist. None: all annexes
    are taken. Raises BundleError if a folder is not intact or not the one that `only` names.
    """
    bundle = Bundle.open(path, verify=verify)
    by_target = _annex_folders(bundle.path)
    if only is not None and (missing := sorted(only.keys() - by_target.keys())):
        raise BundleError(
            f"{bundle.path}: {prefix_of(missing[0])} is missing", code="bundle-altered"
        )
    annexes = []
    for target, folder in by_target.items():
        if only is not None and target not in only:
            continue
        annex = Annex.open(folder, verify=verify)
        if annex.target != target:
            raise BundleError(f"{folder}: is the annex of {annex.target}")
        if only is not None and annex.digest != only[target]:
            raise BundleError(
                f"{folder}: another annex ({annex.digest[:12]}…) than the promoted one "
                f"({only[target][:12]}…)",
                code="bundle-altered",
            )
        annexes.append(annex)
    return attach(bundle, annexes)


def _annex_folders(bundle: Path) -> dict[str, Path]:
    """Return the folder `annexes/<device>/<arch>` of each annex in a bundle's folder, by target."""
    root = bundle / ANNEXES
    if not root.exists():
        return {}
    if not root.is_dir():
        raise BundleError(f"{bundle}: {ANNEXES} is not a folder")
    devices = sorted(root.iterdir())
    annexes = [path for device in devices if device.is_dir() for path in sorted(device.iterdir())]
    if others := [path for path in (*devices, *annexes) if not path.is_dir()]:
        raise BundleError(f"{bundle}: {others[0].relative_to(bundle).as_posix()} is not an annex")
    return {path.relative_to(root).as_posix(): path for path in annexes}
