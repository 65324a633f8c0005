"""A version's files: in a folder of this host, or to be fetched over the network."""

from __future__ import annotations

import errno
import shutil
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

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
from registry.mlflow import Access, Version, tag_of
from registry.store.cache import Cache, Fill
from soa.files import read_plain
from soa.text import logger

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

FOLDER = "bundle"  # in the run's artifacts

T = TypeVar("T", Bundle, Annex)
log = logger("soa-pipeline")


def local_folder(uri: str) -> Path | None:
    """The folder that an artifact URI means, or None if it is not one of this host."""
    address = urlsplit(uri)
    if address.scheme == "file" and address.netloc in ("", "localhost"):
        return Path(unquote(address.path))
    return Path(uri) if address.scheme == "" and uri.startswith("/") else None


def existing_folder(version: Version) -> Path | None:
    path = local_folder(version.source)
    return path if path is not None and path.is_dir() else None


def annex_place(target: str, digest: str) -> str:
    """Where a version's run keeps an annex, beside its bundle: a folder of its own for each, so
    that two builders of one target write nothing in common."""
    return f"{ANNEXES}/{tag_of(target)}/{digest}"


@dataclass(frozen=True)
class Source:
    """Where the files of a version are taken from.

    `in_place`: from the store's own folder, where that is on this host. `fetch`: into the cache,
    where it has them not; without it nothing is fetched.
    """

    access: Access
    version: Version
    cache: Cache
    in_place: bool = True
    fetch: bool = True

    def bundle(self, verify: bool) -> Bundle:
        """Without its annexes."""
        version = self.version
        return self._opened(
            version.digest,
            existing_folder(version),
            lambda path: _bundle_at(version, path, verify),
            lambda into: _fetch_bundle(self.access, version, into),
        )

    def annex(self, target: str, verify: bool) -> Annex:
        version, folder = self.version, existing_folder(self.version)
        return self._opened(
            version.annexes[target],
            _beside(folder, version, target) if folder else None,
            lambda path: _annex_at(version, target, path, verify),
            lambda into: _fetch_annex(self.access, version, into, target),
        )

    def _opened(
        self, digest: str, local: Path | None, open_at: Callable[[Path], T], fill: Fill
    ) -> T:
        if local is not None and self.in_place and self.fetch:
            return open_at(local)
        try:
            held = self.cache.hold(digest, fill if self.fetch else None)
        except NotCachedError:
            if local is None:
                raise
            return open_at(local)
        try:
            opened = open_at(held.path)
        except BundleError as error:
            if not self.fetch:
                raise
            log.warning("the cache has a damaged copy, which is fetched again: %s", str(error))
            held = self.cache.refill(held, fill)
            opened = open_at(held.path)
        return replace(opened, holds=(held,))


def fetch(access: Access, version: Version, dest: Path) -> None:
    """Copy the bundle and its annexes to the new folder `dest`, verified, or nothing."""
    with write_atomically(dest) as partly:
        bundle = _fetch_bundle(access, version, partly)
        annexes = []
        for target in version.annexes:
            (partly / ANNEXES / target).mkdir(parents=True)
            annexes.append(_fetch_annex(access, version, partly / ANNEXES / target, target))
        attach(bundle, annexes)


def _fetch_bundle(access: Access, version: Version, into: Path) -> Bundle:
    """The bundle alone, into an empty folder, verified."""
    _download(access, version, into)
    # A note of promotion or annexes that lie there are of another registry: only this one can say
    # whether this version is promoted, and what was built for it.
    (into / PROMOTED).unlink(missing_ok=True)
    shutil.rmtree(into / ANNEXES, ignore_errors=True)
    return _bundle_at(version, into)


def _fetch_annex(access: Access, version: Version, into: Path, target: str) -> Annex:
    _download(access, version, into, target)
    return _annex_at(version, target, into)


def _download(access: Access, version: Version, into: Path, target: str | None = None) -> None:
    """The bundle, or the annex of a target."""
    local = local_folder(version.source)
    if local is not None:
        if not local.is_dir():
            raise BundleError(f"{version.ref}: its files are gone, they were in {local}")
        if target is None:
            copy_sealed(Bundle.open(local, verify=False), into)
        else:
            copy_sealed(Annex.open(_beside(local, version, target), verify=False), into)
        return
    with access.client() as client:
        if target is None:
            where = client.get_model_version_download_uri(version.name, str(version.number))
        else:
            where = _run_uri(client, str(version.run_id))
            where = f"{where}/{annex_place(target, version.annexes[target])}"
        repository(access, where).download_artifacts("", str(into))


def _beside(bundle: Path, version: Version, target: str) -> Path:
    return bundle.parent / annex_place(target, version.annexes[target])


def _bundle_at(version: Version, path: Path, verify: bool = True) -> Bundle:
    bundle = Bundle.open(path, verify=verify)
    # The digest covers SHA256SUMS, which covers each file.
    if bundle.digest != version.digest:
        raise BundleError(
            f"{version.ref}: the files in {bundle.path} are another bundle ({bundle.digest[:12]}…) "
            f"than the one registered ({version.digest[:12]}…)"
        )
    return bundle


def _annex_at(version: Version, target: str, path: Path, verify: bool = True) -> Annex:
    annex = Annex.open(path, verify=verify)
    if annex.target != target or annex.digest != version.annexes[target]:
        raise BundleError(
            f"{version.ref}: the files in {path} are another annex ({annex.target}, "
            f"{annex.digest[:12]}…) than the one registered ({target}, "
            f"{version.annexes[target][:12]}…)"
        )
    return annex


def copy_sealed(opened: Bundle | Annex, into: Path) -> None:
    # Opened before the copy: links and special files are refused. Not copytree: it goes on where
    # the disk is full, and its error is a list.
    for name in sealed_names(opened):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(opened.path / name, into / name, follow_symlinks=False)


def sealed_names(opened: Bundle | Annex) -> list[str]:
    """What is copied of a sealed folder: not what lies beside, as annexes and notes."""
    names = opened.files
    if isinstance(opened, Bundle):
        names = {name: names[name] for name in names if opened.place(name)[0] == opened.path}
    return [*names, SUMS, *([SIGNATURE] if (opened.path / SIGNATURE).exists() else [])]


# Signatures


def signature_of(access: Access, version: Version) -> bytes | None:
    """`bundle.sig` as the store has it now."""
    local = existing_folder(version)
    if local is not None:
        return Bundle.open(local, verify=False).signature()
    with access.client() as client, tempfile.TemporaryDirectory(prefix="soa-signature-") as folder:
        where = client.get_model_version_download_uri(version.name, str(version.number))
        store = repository(access, where)
        if not any(file.path == SIGNATURE for file in store.list_artifacts()):
            return None
        store.download_artifacts(SIGNATURE, folder)
        return read_plain(Path(folder, SIGNATURE))


def publish_signature(access: Access, version: Version, signature: Path) -> None:
    """Put `bundle.sig` beside the version's files."""
    local = existing_folder(version)
    if local is not None:
        put_signature(read_plain(signature), local)
        return
    with access.client(write=True) as client:
        client.log_artifact(str(version.run_id), str(signature), FOLDER)


def put_signature(signature: bytes, folder: Path) -> None:
    # Written beside the folder: in it would lie a file that does not belong there.
    partly = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.sig"
    try:
        partly.write_bytes(signature)
        partly.replace(folder / SIGNATURE)
    finally:
        partly.unlink(missing_ok=True)


# The artifact store


def repository(access: Access, where: str) -> Any:
    """MLflow's access to the files behind a URI."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    # With one of the two URIs left out, MLflow would take it from the environment.
    return get_artifact_repository(where, tracking_uri=access.uri, registry_uri=access.uri)


def _run_uri(client: MlflowClient, run: str) -> str:
    return str(client.get_run(run).info.artifact_uri).rstrip("/")


def stored(access: Access, uri: str) -> dict[str, int]:
    """Every file below a URI of an artifact store, relative to it, and its bytes."""
    local = local_folder(uri)
    if local is not None:
        files = (path for path in local.rglob("*") if not path.is_dir() or path.is_symlink())
        return {path.relative_to(local).as_posix(): path.lstat().st_size for path in files}
    store, found, pending = repository(access, uri), {}, [""]
    while pending:
        for each in store.list_artifacts(pending.pop() or None):
            if each.is_dir:
                pending.append(each.path)
            else:
                found[str(each.path)] = int(each.file_size or 0)
    return found


def remove_files(access: Access, uri: str) -> int:
    """All that is below a URI of an artifact store; returns their bytes."""
    size = sum(stored(access, uri).values())
    local = local_folder(uri)
    if local is not None:
        # Without its list it is no annex any more, however far the rest comes.
        (local / SUMS).unlink(missing_ok=True)
        remove_tree(local)
    elif size:
        repository(access, uri).delete_artifacts()
    return size


def remove_run(access: Access, client: MlflowClient, run: str) -> int:
    """Remove the files of a run that no version refers to, and the run; returns their bytes.

    Killed on the way, it leaves a run that `registry.housekeeping.garbage` finds.
    """
    info = client.get_run(run).info
    where = info.artifact_uri.rstrip("/")
    size = remove_files(access, where)
    local = local_folder(where)
    if local is not None and local.parent.name == run:
        remove_tree(local.parent)
    if info.lifecycle_stage == "active":
        client.delete_run(run)
    return size


def remove_tree(folder: Path) -> None:
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            # Another process may remove the same, or still write into it.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
