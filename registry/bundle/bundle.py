"""A bundle: the folder with all files of one model version. It is never changed.

Its seal (digests.py) lists the files that belong to it; the bundle's digest is that of the seal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from registry.bundle.card import require_cards
from registry.bundle.digests import MANIFEST, SIGNATURE, Sealed, open_sealed, read_sealed
from registry.bundle.manifest import Manifest
from registry.errors import BundleError
from soa.records import as_record, parse_json

if TYPE_CHECKING:
    from registry.bundle.annex import Annex

ANNEXES = "annexes"
"""The subfolder of a pulled bundle for targets that were built later: registry/bundle/annex.py."""
VALIDATION = "reports/validation.json"
BENCHMARK = "reports/benchmark.json"
CURVES = "reports/metrics.json"


@dataclass(frozen=True, kw_only=True)
class Bundle(Sealed):
    """An opened bundle.

    With annexes (`registry.bundle.annex.attach`), the targets of the manifest, the files and the
    reports include those of the annexes. `digest` is always that of the bundle alone.
    """

    manifest: Manifest
    annexes: Mapping[str, Annex] = field(default_factory=dict, repr=False)
    """The attached annexes by target."""

    def __repr__(self) -> str:
        manifest = self.manifest
        targets = [f"{t} {r.choice()} {r.status}" for t, r in manifest.targets.items()]
        return f"Bundle({manifest.name} {self.digest[:12]} in {self.path}: {', '.join(targets)})"

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Self:
        """Open a bundle. Raises a BundleError that names the file if it is not intact.

        The structure and the manifest are always checked; `verify=False` leaves out only the
        digests of the other files and the cards of the artifacts. With `verify=True` every file is
        read once, a card twice. Annexes in the
        folder are ignored; `registry.bundle.annex.open_folder` opens them too.
        """
        content, sealed = open_sealed(path, MANIFEST, aside=(ANNEXES,), verify=verify)
        root = sealed["path"]
        manifest = Manifest.from_json(content, where=str(root / MANIFEST))
        for name, where in manifest.files().items():
            if name not in sealed["files"]:
                raise BundleError(f"{root}: {MANIFEST} names {name} ({where}), which is not there")
        if verify:
            for record in manifest.targets.values():
                require_cards(root, sealed["files"], manifest.signature, record)
        return cls(manifest=manifest, **sealed)

    def verify(self) -> None:
        super().verify()
        for annex in self.annexes.values():
            annex.verify()

    def file(self, name: str) -> Path:
        """The path of a file. `name`: relative to the bundle."""
        root, inside = self.place(name)
        return root / inside

    def place(self, name: str) -> tuple[Path, str]:
        """The folder that contains a file (the bundle's or an annex's), and its name there."""
        if name not in self.files:
            raise BundleError(f"{self.path}: the bundle has no file {name!r}")
        for annex in self.annexes.values():
            if name.startswith(annex.prefix):
                return annex.path, name.removeprefix(annex.prefix)
        return self.path, name

    def validation(self) -> dict[str, Any] | None:
        """`reports/validation.json`, or None if the bundle has none."""
        return self._report(VALIDATION)

    def benchmark(self) -> dict[str, Any] | None:
        """`reports/benchmark.json`, or None if the bundle has none."""
        return self._report(BENCHMARK)

    def curves(self) -> dict[str, Any] | None:
        """`reports/metrics.json`, or None if there is none, as in bundles of release 1.0."""
        return self._report(CURVES)

    def signature(self) -> bytes | None:
        """The signature file next to the sealed files, or None; see registry/trust."""
        return read_sealed(self.path, SIGNATURE) if os.path.lexists(self.path / SIGNATURE) else None

    def _report(self, name: str) -> dict[str, Any] | None:
        """A report by target. For the target of an annex, the report in the annex is taken."""
        places = [(self.path, self.files), *((a.path, a.files) for a in self.annexes.values())]
        found = [place for place, files in places if name in files]
        report: dict[str, Any] = {}
        for place in found:
            try:
                report |= as_record(dict[str, Any], parse_json(read_sealed(place, name)))
            except ValueError as error:
                raise BundleError(f"{place / name}: not a JSON object: {error}") from error
        return report if found else None
