"""Build at first use: an artifact for a host that none was packaged for, kept in this host's cache.

It is an annex that no registry knows, `built/<digest of the bundle>/<target>/<key>` in the cache
folder; the key stands for the tools and the code that made it. It is there whole or not at all, and
only after every check that `pipeline run` makes; each time it is opened, its digests are checked.
One process builds and the others wait.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from filelock import FileLock

from engines.target import Target, check_host_runs
from pipeline.building.cache import content_key
from pipeline.building.candidates import Say
from pipeline.building.provenance import code_digest, host, tools
from pipeline.building.target import build_candidates
from registry.bundle import Annex, Bundle
from registry.errors import BundleError
from registry.mlflow import tag_of
from registry.store import CACHE_VARIABLE, cache_root
from runtime.errors import LoadError
from stages.packaging import package_annex


def build_at_first_use(
    bundle: Bundle, target: Target, cache: Path | None = None, say: Say = lambda text: None
) -> Annex:
    """The artifact for `target` from the cache, built and validated now if it is not there."""
    check_host_runs(target)
    key = content_key({"tools": tools(), "code": code_digest()})
    root = cache_root(cache) / "built"
    place = root / bundle.digest / tag_of(str(target)) / key
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{place}.lock"):
            return _whole(place, bundle) or _built(place, bundle, target, say)
    except OSError as error:
        raise LoadError(
            f"cannot build {bundle.manifest.name} for {target} in {root}: {error.strerror}: name "
            f"another folder with {CACHE_VARIABLE}"
        ) from error


def _whole(place: Path, bundle: Bundle) -> Annex | None:
    """What lies in the cache, unless it is damaged: then it is built again."""
    if not place.is_dir():
        return None
    try:
        annex = Annex.open(place)
    except BundleError:
        return None
    return annex if annex.record.base == bundle.digest else None


def _built(place: Path, bundle: Bundle, target: Target, say: Say) -> Annex:
    work = place.with_name(f"{place.name}.work")
    result = build_candidates(bundle, target, (), work, say)
    annex = package_annex(place, bundle, result, tools(), host(), replace=True)
    shutil.rmtree(work, ignore_errors=True)  # kept after a failure: its logs say why
    return annex
