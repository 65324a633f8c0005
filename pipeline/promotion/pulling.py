"""Pull: copies a version to a folder that runs without a registry."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from registry.bundle import Bundle, PulledNote, read_note, write_note
from registry.history import PRODUCTION
from registry.housekeeping import oci
from registry.store import Registry
from registry.version import Version
from runtime.errors import LoadError
from runtime.opening import require_promoted, require_vouched, why_torch


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
    with _removed_after_errors(folder):
        if runtime:
            _require_no_torch(version.ref, bundle)
        if note is not None:
            write_note(folder, note)
    return version, bundle


def pull_artifact(address: str, folder: Path, *, runtime: bool = False) -> tuple[str, Bundle]:
    """Like `pull`, from an OCI registry: see `registry.housekeeping.oci.pull`. A note of promotion
    comes along with the files. Returns the address by digest, and the bundle."""
    pinned, bundle = oci.pull(address, folder)
    with _removed_after_errors(folder):
        if runtime:
            require_vouched(address, read_note(folder), bundle)
            _require_no_torch(address, bundle)
    return pinned, bundle


def _require_no_torch(called: str, bundle: Bundle) -> None:
    if why := why_torch(bundle.manifest):
        raise LoadError(f"{called} was not pulled: {why}")


@contextlib.contextmanager
def _removed_after_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
