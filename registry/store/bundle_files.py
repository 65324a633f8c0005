"""A version's files: in a folder of this host, or fetched over the network."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from registry import trust
from registry.bundle import (
    ANNEXES,
    PROMOTED,
    SIGNATURE,
    SUMS,
    Annex,
    Bundle,
    attach,
    write_atomically,
)
from registry.errors import BundleError, NotCachedError
from registry.mlflow import Access
from registry.store.host_cache import Cache
from registry.version import Version, tag_of
from soa.files import read_plain
from soa.text import logger

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

FOLDER = "bundle"  # in the run's artifacts

T = TypeVar("T", Bundle, Annex)
log = logger("soa-pipeline")


def local_folder(uri: str) -> Path | None:
    """Return the folder that an artifact URI names, or None if it names no folder of this host."""
    address = urlsplit(uri)
    if address.scheme == "file" and address.netloc in ("", "localhost"):
        return Path(unquote(address.path))
    return Path(uri) if address.scheme == "" and uri.startswith("/") else None


def existing_folder(version: Version) -> Path | None:
    """Return the folder of a version's files; None if it is not on this host, or is missing."""
    path = local_folder(version.source)
    return path if path is not None and path.is_dir() else None


def annex_path(target: str, digest: str) -> str:
    """Return the path of an annex in a run's artifacts.

    Each annex has a separate folder, so that two processes that build the same target never write
    the same files.
    """
    return f"{ANNEXES}/{tag_of(target)}/{digest}"


@dataclass(frozen=True)
class Source:
    """The place from which the files of a version are opened.

    `in_place`: open them in the store's folder if that is on this host. `fetch`: copy files into
    the cache if they are not there; False: never fetch.
    """

    access: Access
    version: Version
    cache: Cache
    in_place: bool = True
    fetch: bool = True

    def open(self, kind: type[T], target: str | None, verify: bool) -> T:
        """Open the bundle without its annexes (`target` None), or the annex for a target.

        `kind`: Bundle or Annex accordingly. A damaged copy in the cache is fetched again.
        """
        version, folder = self.version, existing_folder(self.version)
        local = None if folder is None else _folder_in_store(folder, version, target)
        if local is not None and self.in_place and self.fetch:
            return _open_registered(kind, version, target, local, verify)

        def fill(into: Path) -> None:
            """Fetch the files into a folder of the cache."""
            _copy_registered(kind, self.access, version, target, into)

        try:
            entry = self.cache.hold(_expected_digest(version, target), fill if self.fetch else None)
        except NotCachedError:
            if local is None:
                raise
            return _open_registered(kind, version, target, local, verify)
        try:
            opened = _open_registered(kind, version, target, entry.path, verify)
        except BundleError as error:
            if not self.fetch:
                raise
            log.warning("the cache has a damaged copy, which is fetched again: %s", str(error))
            entry = self.cache.refill(entry, fill)
            opened = _open_registered(kind, version, target, entry.path, verify)
        return replace(opened, holds=(entry,))  # the entry stays as long as the opened folder


def fetch(access: Access, version: Version, dest: Path) -> None:
    """Copy a version's bundle and annexes to the new folder `dest`, and verify them.

    If that fails, `dest` is not created.
    """
    with write_atomically(dest) as partial:
        bundle = _copy_registered(Bundle, access, version, target=None, into=partial)
        annexes = []
        for target in version.annexes:
            into = partial / ANNEXES / target
            into.mkdir(parents=True)
            annexes.append(_copy_registered(Annex, access, version, target, into))
        attach(bundle, annexes)  # raises if an annex does not belong to the bundle


def _copy_registered(
    kind: type[T], access: Access, version: Version, target: str | None, into: Path
) -> T:
    """Copy the bundle (`target` None) or the annex for a target into an empty folder; verify it.

    Returns it opened in that folder.
    """
    local = local_folder(version.source)
    if local is not None:
        if not local.is_dir():
            raise BundleError(f"{version.ref}: its files are gone, they were in {local}")
        copy_sealed(kind.open(_folder_in_store(local, version, target), verify=False), into)
    else:
        with access.client() as client:
            if target is None:
                uri = client.get_model_version_download_uri(version.name, str(version.number))
            else:
                run = client.get_run(str(version.run_id)).info.artifact_uri.rstrip("/")
                uri = f"{run}/{annex_path(target, version.annexes[target])}"
            open_repository(access, uri).download_artifacts("", str(into))
    if target is None:
        # A promotion note or annexes among these files come from another registry. Only this
        # registry knows whether this version is promoted, and which targets were added to it.
        (into / PROMOTED).unlink(missing_ok=True)
        shutil.rmtree(into / ANNEXES, ignore_errors=True)
    return _open_registered(kind, version, target, into, verify=True)


def _open_registered(
    kind: type[T], version: Version, target: str | None, path: Path, verify: bool
) -> T:
    """Open the bundle (`target` None) or the annex for a target in a folder.

    Raises BundleError if it is not the one that the version registered.
    """
    opened, registered = kind.open(path, verify=verify), _expected_digest(version, target)
    # The digest covers SHA256SUMS, which covers each file.
    another = opened.digest != registered
    if another or (isinstance(opened, Annex) and opened.target != target):
        noun = "bundle" if target is None else "annex"
        raise BundleError(
            f"{version.ref}: the files in {path} are another {noun} ({opened.digest[:12]}…) than "
            f"the one registered ({registered[:12]}…)",
            code="bundle-altered",
        )
    return opened


def _expected_digest(version: Version, target: str | None) -> str:
    """Return the registered digest of the bundle (`target` None) or of the annex for a target."""
    return version.digest if target is None else version.annexes[target]


def _folder_in_store(bundle: Path, version: Version, target: str | None) -> Path:
    """Return the folder of the bundle (`target` None) or an annex, in a store on this host.

    `bundle`: the bundle's folder, next to which the annexes are.
    """
    if target is None:
        return bundle
    return bundle.parent / annex_path(target, version.annexes[target])


def copy_sealed(opened: Bundle | Annex, into: Path) -> None:
    """Copy the files that `sealed_names` lists into the folder `into`."""
    # The folder was opened before, so it has no links or special files. shutil.copytree is not
    # used: it continues after the disk is full, and its error is a list.
    for name in sealed_names(opened):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(opened.path / name, into / name, follow_symlinks=False)


def sealed_names(opened: Bundle | Annex) -> list[str]:
    """Return the names of the files to copy: the sealed ones, their seal and the signature.

    Annexes and notes are left out.
    """
    names = opened.files
    if isinstance(opened, Bundle):
        names = {name: names[name] for name in names if opened.place(name)[0] == opened.path}
    return [*names, SUMS, *([SIGNATURE] if (opened.path / SIGNATURE).exists() else [])]


# Signatures


def read_signature(access: Access, version: Version) -> bytes | None:
    """Read `bundle.sig` in the store; None if the version is not signed."""
    local = existing_folder(version)
    if local is not None:
        return Bundle.open(local, verify=False).signature()
    with access.client() as client, tempfile.TemporaryDirectory(prefix="soa-signature-") as folder:
        uri = client.get_model_version_download_uri(version.name, str(version.number))
        store = open_repository(access, uri)
        if not any(file.path == SIGNATURE for file in store.list_artifacts()):
            return None
        store.download_artifacts(SIGNATURE, folder)
        return read_plain(Path(folder, SIGNATURE))


def publish_signature(access: Access, version: Version, signature: Path) -> None:
    """Copy the file `signature` as `bundle.sig` into the folder of the version's files."""
    local = existing_folder(version)
    if local is not None:
        trust.put_signature(read_plain(signature), local)
        return
    with access.client(write=True) as client:
        client.log_artifact(str(version.run_id), str(signature), FOLDER)


# The artifact store


def open_repository(access: Access, uri: str) -> Any:
    """Return MLflow's ArtifactRepository for the files at a URI."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    # Both URIs are given: MLflow would take a missing one from the environment.
    return get_artifact_repository(uri, tracking_uri=access.uri, registry_uri=access.uri)


def stored_sizes(access: Access, uri: str) -> dict[str, int]:
    """Return the size in bytes of every file below a URI of an artifact store, by relative path.

    Other processes may write and remove files meanwhile.
    """
    sizes: dict[str, int] = {}
    local = local_folder(uri)
    if local is not None:
        for folder, _, names in os.walk(local):
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    sizes[path.relative_to(local).as_posix()] = path.lstat().st_size
        return sizes
    store = open_repository(access, uri)
    folders = [""]  # the empty path: the folder at `uri` itself
    while folders:
        for listed in store.list_artifacts(folders.pop() or None):
            if listed.is_dir:
                folders.append(listed.path)
            else:
                sizes[str(listed.path)] = int(listed.file_size or 0)
    return sizes


def remove_files(access: Access, uri: str) -> int:
    """Remove all files below a URI of an artifact store; return their size in bytes."""
    size = sum(stored_sizes(access, uri).values())
    local = local_folder(uri)
    if local is not None:
        # Without SHA256SUMS it is no annex any more, even if removing the rest is interrupted.
        (local / SUMS).unlink(missing_ok=True)
        remove_tree(local)
    elif size:
        open_repository(access, uri).delete_artifacts()
    return size


def remove_run(access: Access, client: MlflowClient, run: str) -> int:
    """Remove a run to which no version refers, with its files; return their size in bytes.

    If the process is killed meanwhile, `registry.housekeeping.garbage` finds the run.
    """
    info = client.get_run(run).info
    uri = info.artifact_uri.rstrip("/")
    size = remove_files(access, uri)
    local = local_folder(uri)
    if local is not None and local.parent.name == run:
        remove_tree(local.parent)
    if info.lifecycle_stage == "active":
        client.delete_run(run)
    return size


def remove_tree(folder: Path) -> None:
    """Remove a folder on this host, if it exists.

    Other processes may remove it or write into it meanwhile: then it is tried again.
    """
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
