"""Pull: copies a version to a folder that runs without a registry."""

from __future__ import annotations

import shutil
from pathlib import Path

from registry.bundle import Bundle, PulledNote, read_note, write_note
from registry.history import PRODUCTION
from registry.housekeeping import oci
from registry.store import Registry
from runtime.errors import LoadError
from runtime.opening import require_promoted, require_vouched, why_torch_is_needed


def pull(
    registry: Registry, ref: str, folder: Path, *, runtime: bool = False
) -> tuple[str, Bundle]:
    """Copy the bundle of `ref` and its annexes into the new `folder`, and verify the digests.

    Returns the name of the version, such as `name/3`, and the bundle. After an error there is no
    folder. If the version was promoted to production, the folder gets a note of this, with the
    digest. Raises LoadError if the record of the promotion is not of this version, and with
    `runtime` also if soa-runtime alone cannot run the folder.

    `ref` may be the address of an OCI registry, see `registry.housekeeping.oci.pull`: the note
    comes with the files, and the name is the address by digest.
    """
    note = None
    if ref.startswith("oci://"):
        name, bundle = oci.pull(ref, folder)
    else:
        version = registry.find(ref)
        if version.promotion(PRODUCTION) is not None or runtime:
            promotion = require_promoted(version, registry.promotions(version, PRODUCTION))
            covered = {
                target: digest
                for target, digest in version.annexes.items()
                if promotion.annexes.get(target) == digest
            }
            note = PulledNote(version.ref, version.digest, promotion.by, promotion.at, covered)
        name, bundle = version.ref, registry.fetch(version, folder)
    try:
        if note is not None:
            write_note(folder, note)
        if runtime:
            require_vouched(ref, read_note(folder), bundle)
            if why := why_torch_is_needed(bundle.manifest):
                raise LoadError(f"{name} was not pulled: {why}")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return name, bundle
