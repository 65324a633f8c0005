"""A bundle: the folder that holds everything of one model version, and that nothing may change.

Its seal (digests.py) says which files belong to it, and its digest is that of the seal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from registry.bundle.digests import MANIFEST, SIGNATURE, Sealed, open_sealed, read_sealed
from registry.bundle.manifest import Manifest
from registry.errors import BundleError
from soa.records import as_record, parse_json

if TYPE_CHECKING:
    from registry.bundle.annex import Annex

ANNEXES = "annexes"
"""Where a pulled bundle keeps what was built for more targets later: registry/bundle/annex.py."""
VALIDATION = "reports/validation.json"
BENCHMARK = "reports/benchmark.json"
CURVES = "reports/metrics.json"


@dataclass(frozen=True, kw_only=True)
class Bundle(Sealed):
    """An opened bundle.

    With annexes (`registry.bundle.annex.attach`), the targets of the manifest, the files and the
    reports are those of the bundle and of its annexes together; `digest` is always that of the
    bundle.
    """

    manifest: Manifest
    annexes: Mapping[str, Annex] = field(default_factory=dict, repr=False)
    """By target."""

    def __repr__(self) -> str:
        manifest = self.manifest
        targets = [f"{t} {r.choice()} {r.status}" for t, r in manifest.targets.items()]
        return f"Bundle({manifest.name} {self.digest[:12]} in {self.path}: {', '.join(targets)})"

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Self:
        """Refuse, with a BundleError naming the file, whatever is not the sealed bundle.

        The structure and the manifest are always checked; `verify=False` leaves out only the
        digests of the other files. With `verify=True` every file is read once. Annexes in the
        folder are left aside: `registry.bundle.annex.open_folder` takes them too.
        """
        content, sealed = open_sealed(path, MANIFEST, aside=(ANNEXES,), verify=verify)
        root = sealed["path"]
        manifest = Manifest.from_json(content, where=str(root / MANIFEST))
        for name, where in manifest.files().items():
            if name not in sealed["files"]:
                raise BundleError(f"{root}: {MANIFEST} names {name} ({where}), which is not there")
        return cls(manifest=manifest, **sealed)

    def verify(self) -> None:
        super().verify()
        for annex in self.annexes.values():
            annex.verify()

    def file(self, name: str) -> Path:
        """The path of a file of the bundle, given relative to it."""
        root, inside = self.place(name)
        return root / inside

    def place(self, name: str) -> tuple[Path, str]:
        """The folder that holds a file of the bundle, its own or an annex's, and the name there."""
        if name not in self.files:
            raise BundleError(f"{self.path}: the bundle has no file {name!r}")
        for annex in self.annexes.values():
            if name.startswith(annex.prefix):
                return annex.path, name.removeprefix(annex.prefix)
        return self.path, name

    def validation(self) -> dict[str, Any] | None:
        """`reports/validation.json`, or None where the bundle has none."""
        return self._report(VALIDATION)

    def benchmark(self) -> dict[str, Any] | None:
        """`reports/benchmark.json`, or None where the bundle has none."""
        return self._report(BENCHMARK)

    def curves(self) -> dict[str, Any] | None:
        """`reports/metrics.json`, or None where it has none, as in bundles of 1.0."""
        return self._report(CURVES)

    def signature(self) -> bytes | None:
        """What lies beside the sealed files as their signature; see registry/trust."""
        return read_sealed(self.path, SIGNATURE) if os.path.lexists(self.path / SIGNATURE) else None

    def _report(self, name: str) -> dict[str, Any] | None:
        """A report by target; for the target of an annex its own report counts."""
        places = [(self.path, self.files), *((a.path, a.files) for a in self.annexes.values())]
        found = [place for place, files in places if name in files]
        report: dict[str, Any] = {}
        for place in found:
            try:
                report |= as_record(dict[str, Any], parse_json(read_sealed(place, name)))
            except ValueError as error:
                raise BundleError(f"{place / name}: not a JSON object: {error}") from error
        return report if found else None
