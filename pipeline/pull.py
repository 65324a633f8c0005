"""Pull: a version as a folder that runs without a registry."""

from __future__ import annotations

import shutil
from pathlib import Path

from registry.bundle import Bundle
from registry.promoted import Promoted, write_promoted
from registry.store import Registry
from registry.version import Version


def pull(registry: Registry, ref: str, folder: Path) -> tuple[Version, Bundle]:
    """Copy the bundle of `ref` and its annexes into the new `folder`, whole and verified or not at
    all.

    If the version was promoted to production, the folder says so, by its digest.
    """
    version = registry.find(ref)
    bundle = registry.fetch(version, folder)
    record = version.promotion("production")
    if record is not None:
        try:
            promoted = Promoted(
                version.ref, bundle.digest, record.by, record.at, dict(record.annexes)
            )
            write_promoted(folder, promoted)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return version, bundle
