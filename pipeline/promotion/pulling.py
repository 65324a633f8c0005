"""Pull: copies a version to a folder that runs without a registry."""

from __future__ import annotations

import shutil
from pathlib import Path

from registry.bundle import Bundle, PulledNote, write_note
from registry.history import PRODUCTION
from registry.store import Registry
from registry.version import Version
from runtime.errors import LoadError
from runtime.opening import require_promoted, why_torch


def pull(
    registry: Registry, ref: str, folder: Path, *, runtime: bool = False
) -> tuple[Version, Bundle]:
    """Copy the bundle of `ref` and its annexes into the new `folder`, and verify the digests. After
    an error there is no folder.

    If the version was promoted to production, the folder gets a note of this, with the digest.
    LoadError if the record of the promotion is not of this version; with `runtime` also if
    soa-runtime alone cannot run the folder.
    """
    version = registry.find(ref)
    note = None
    if version.promotion(PRODUCTION) is not None or runtime:
        promotion = require_promoted(version, registry.promotions(version, PRODUCTION))
        let_pass = {t: d for t, d in version.annexes.items() if promotion.annexes.get(t) == d}
        note = PulledNote(version.ref, version.digest, promotion.by, promotion.at, let_pass)
    bundle = registry.fetch(version, folder)
    try:
        if runtime and (why := why_torch(bundle.manifest)):
            raise LoadError(f"{version.ref} was not pulled: {why}")
        if note is not None:
            write_note(folder, note)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return version, bundle
