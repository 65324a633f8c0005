"""Where a version's files are: in a folder of this host, or to be fetched over the network."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from registry.bundle import SIGNATURE, SUMS, Bundle, write_atomically
from registry.errors import BundleError
from registry.mlflow_access import Access
from registry.promoted import PROMOTED
from registry.version import Version

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

FOLDER = "bundle"  # in the run's artifacts
CACHE_VARIABLE = "PIPELINE_CACHE"


def local_folder(uri: str) -> Path | None:
    """The folder that an artifact URI means, or None if it is not one of this host."""
    address = urlsplit(uri)
    if address.scheme == "file" and address.netloc in ("", "localhost"):
        return Path(unquote(address.path))
    return Path(uri) if address.scheme == "" and uri.startswith("/") else None


def existing_folder(version: Version) -> Path | None:
    path = local_folder(version.source)
    return path if path is not None and path.is_dir() else None


def fetch(access: Access, version: Version, dest: Path) -> None:
    """Copy the bundle to the new folder `dest`, whole and verified or not at all."""
    with write_atomically(dest) as partial:
        _download(access, version, partial)
        # Registered from a pulled folder, its note of promotion came along. It speaks of another
        # registry: whether this version is promoted, only this registry can say.
        (partial / PROMOTED).unlink(missing_ok=True)
        # The digest covers SHA256SUMS, which covers each file.
        require_digest(Bundle.open(partial), version)


def cached(access: Access, version: Version, cache: str | Path | None) -> Path:
    """The bundle's folder in the cache, where it is fetched to first if it is not there."""
    path = _cache_root(cache) / version.digest
    if not path.is_dir():
        try:
            fetch(access, version, path)
        except BundleError:
            # Another process may have been quicker; its copy is as good.
            if not path.is_dir():
                raise
    return path


def publish_signature(access: Access, version: Version, signature: Path) -> None:
    """Put `bundle.sig` beside the version's files, where those are not in a folder of this host."""
    with access.client(write=True) as client:
        client.log_artifact(str(version.run_id), str(signature), FOLDER)


def refresh_signature(access: Access, version: Version, folder: Path) -> None:
    """Take the store's `bundle.sig`, which may be newer than the files in a cache, into it."""
    with access.client() as client, tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        store = _store(access, client, version)
        if any(file.path == SIGNATURE for file in store.list_artifacts()):
            store.download_artifacts(SIGNATURE, partial)
            Path(partial, SIGNATURE).replace(folder / SIGNATURE)


def require_digest(bundle: Bundle, version: Version) -> None:
    if bundle.digest != version.digest:
        raise BundleError(
            f"{version.ref}: the files in {bundle.path} are another bundle ({bundle.digest[:12]}…) "
            f"than the one registered ({version.digest[:12]}…)"
        )


def _download(access: Access, version: Version, into: Path) -> None:
    local = local_folder(version.source)
    if local is not None:
        if not local.is_dir():
            raise BundleError(f"{version.ref}: its files are gone, they were in {local}")
        # Opened before the copy: links and special files are refused. Not copytree: it goes on
        # where the disk is full, and its error is a list.
        signature = [SIGNATURE] if (local / SIGNATURE).exists() else []
        for name in (*Bundle.open(local, verify=False).files, SUMS, *signature):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(local / name, into / name, follow_symlinks=False)
        return
    with access.client() as client:
        _store(access, client, version).download_artifacts("", str(into))


def _store(access: Access, client: MlflowClient, version: Version) -> Any:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    where = client.get_model_version_download_uri(version.name, str(version.number))
    # With one of the two URIs left out, MLflow would take it from the environment.
    return get_artifact_repository(where, tracking_uri=access.uri, registry_uri=access.uri)


def _cache_root(cache: str | Path | None) -> Path:
    chosen = cache or os.environ.get(CACHE_VARIABLE)
    if chosen is not None:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "soa-pipeline"
