"""Where a version's files are: in a folder of this host, or to be fetched over the network."""

from __future__ import annotations

import errno
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
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


def fetch(
    access: Access, version: Version, dest: Path, annexes: Mapping[str, str] | None = None
) -> None:
    """Copy the bundle to the new folder `dest`, whole and verified or not at all.

    `annexes`: those to take along, by target.
    """
    with write_atomically(dest) as partial:
        bundle = _fetch_bundle(access, version, partial)
        for target, digest in (annexes or {}).items():
            place = partial / ANNEXES / target
            place.mkdir(parents=True)
            _download_annex(access, version, target, digest, place)
        attach(bundle, [_opened(version, t, partial / ANNEXES / t) for t in annexes or {}])


def _fetch_bundle(access: Access, version: Version, partial: Path) -> Bundle:
    """The bundle alone, into an empty folder, verified."""
    _download(access, version, partial)
    # Registered from a pulled folder, its note of promotion and its annexes came along. They
    # speak of another registry: only this one can say whether this version is promoted, and
    # what was built for it.
    (partial / PROMOTED).unlink(missing_ok=True)
    shutil.rmtree(partial / ANNEXES, ignore_errors=True)
    # The digest covers SHA256SUMS, which covers each file.
    bundle = Bundle.open(partial)
    require_digest(bundle, version)
    return bundle


@dataclass(frozen=True)
class Source:
    """Where the files of a version may come from, for who opens it.

    `in_place`: from the store's own folder, where that is on this host. `fetch`: into the cache,
    where it has them not; without it nothing leaves this host.
    """

    access: Access
    version: Version
    cache: Cache
    in_place: bool = True
    fetch: bool = True

    def bundle(self, verify: bool) -> Bundle:
        """Without its annexes."""
        version = self.version

        def open_at(path: Path) -> Bundle:
            bundle = Bundle.open(path, verify=verify)
            require_digest(bundle, version)
            return bundle

        def fill(partial: Path) -> None:
            _fetch_bundle(self.access, version, partial)

        return self._opened(version.digest, existing_folder(version), open_at, fill)

    def annex(self, target: str, verify: bool) -> Annex:
        version, digest = self.version, self.version.annexes[target]
        folder = existing_folder(version)

        def open_at(path: Path) -> Annex:
            return _opened(version, target, path, verify)

        def fill(partial: Path) -> None:
            _download_annex(self.access, version, target, digest, partial)
            _opened(version, target, partial)

        beside = None if folder is None else _beside(folder, version, target)
        return self._opened(digest, beside, open_at, fill)

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


def _beside(bundle: Path, version: Version, target: str) -> Path:
    return bundle.parent / annex_place(target, version.annexes[target])


def _opened(version: Version, target: str, path: Path, verify: bool = True) -> Annex:
    annex = Annex.open(path, verify=verify)
    if annex.target != target or annex.digest != version.annexes[target]:
        raise BundleError(
            f"{version.ref}: the files in {path} are another annex ({annex.target}, "
            f"{annex.digest[:12]}…) than the one registered ({target}, "
            f"{version.annexes[target][:12]}…)"
        )
    return annex


def publish_signature(access: Access, version: Version, signature: Path) -> None:
    """Put `bundle.sig` beside the version's files."""
    local = existing_folder(version)
    if local is not None:
        _put_signature(signature, local)
        return
    with access.client(write=True) as client:
        client.log_artifact(str(version.run_id), str(signature), FOLDER)


def signature_of(access: Access, version: Version) -> bytes | None:
    """`bundle.sig` as the store has it now."""
    local = existing_folder(version)
    if local is not None:
        return Bundle.open(local, verify=False).signature()
    with tempfile.TemporaryDirectory(prefix="soa-signature-") as folder:
        found = _download_signature(access, version, folder)
        return read_plain(found) if found is not None else None


def _download_signature(access: Access, version: Version, into: str) -> Path | None:
    with access.client() as client:
        where = client.get_model_version_download_uri(version.name, str(version.number))
        store = repository(access, where)
        if not any(file.path == SIGNATURE for file in store.list_artifacts()):
            return None
        store.download_artifacts(SIGNATURE, into)
        return Path(into, SIGNATURE)


def refresh_signature(access: Access, version: Version, folder: Path) -> None:
    """Take the store's `bundle.sig`, which may be newer than the files in a cache, into it."""
    with tempfile.TemporaryDirectory(prefix="soa-signature-") as partial:
        found = _download_signature(access, version, partial)
        if found is not None:
            _put_signature(found, folder)


def _put_signature(signature: Path, folder: Path) -> None:
    # Beside the folder first, for in it would lie a file that does not belong there.
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.sig"
    try:
        shutil.copyfile(signature, partial)
        partial.replace(folder / SIGNATURE)
    finally:
        partial.unlink(missing_ok=True)


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
        copy_sealed(Bundle.open(local, verify=False), into)
        return
    with access.client() as client:
        where = client.get_model_version_download_uri(version.name, str(version.number))
        repository(access, where).download_artifacts("", str(into))


def _download_annex(access: Access, version: Version, target: str, digest: str, into: Path) -> None:
    local = local_folder(version.source)
    if local is not None:
        copy_sealed(Annex.open(_beside(local, version, target), verify=False), into)
        return
    with access.client() as client:
        where = client.get_run(str(version.run_id)).info.artifact_uri.rstrip("/")
        place = annex_place(target, digest)
        repository(access, f"{where}/{place}").download_artifacts("", str(into))


def copy_sealed(opened: Bundle | Annex, into: Path) -> None:
    # Opened before the copy: links and special files are refused. Not copytree: it goes on where
    # the disk is full, and its error is a list.
    signature = [SIGNATURE] if (opened.path / SIGNATURE).exists() else []
    for name in (*opened.files, SUMS, *signature):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(opened.path / name, into / name, follow_symlinks=False)


def repository(access: Access, where: str) -> Any:
    """MLflow's access to the files behind a URI."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    # With one of the two URIs left out, MLflow would take it from the environment.
    return get_artifact_repository(where, tracking_uri=access.uri, registry_uri=access.uri)


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


def discard_files(access: Access, client: MlflowClient, run: str) -> int:
    """Remove the files of a run that no version refers to, and the run; returns their bytes.

    Killed on the way, it leaves a run that `registry.housekeeping.garbage` finds.
    """
    info = client.get_run(run).info
    where = info.artifact_uri.rstrip("/")
    size = sum(stored(access, where).values())
    local = local_folder(where)
    if local is None:
        if size:
            repository(access, where).delete_artifacts()
    else:
        remove_tree(local.parent if local.parent.name == run else local)
    if info.lifecycle_stage == "active":
        client.delete_run(run)
    return size


def remove_tree(folder: Path) -> None:
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            # Another process may be at the same, or still write what it will be told is abandoned.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
