"""A seal: `SHA256SUMS` lists every other file of a folder, in the format of `sha256sum -c`.

The digest of `SHA256SUMS` identifies the folder. A missing, altered or extra file, a link or a
special file is refused, because a registry passes these files to other people's processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Self

from registry.bundle.manifest import safe_relative
from registry.bundle.pulled import PROMOTED
from registry.errors import BundleError
from soa.files import open_plain, read_plain

MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
SIGNATURE = "bundle.sig"
MLFLOW_NOTE = "registered_model_meta"
"""A file that MLflow writes into the folder from which it loads a model; it names the version."""
_BESIDE = frozenset({SUMS, SIGNATURE, PROMOTED, MLFLOW_NOTE})
"""Files about the folder, written after it was sealed: `SHA256SUMS` does not list them."""

_SUMS_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_CHUNK = 1 << 18  # bytes read at once: they stay in the cache of the core until hashed
_HASHERS = 8
_WORTH_A_THREAD = 4 << 20  # bytes; hashing them takes some 10 ms


class Identity(NamedTuple):
    """What identifies a file with its content: a write changes at least one of these."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class Hashed(NamedTuple):
    """The sha256 of a file, and its identity when it was hashed."""

    digest: str
    identity: Identity


# Digests that this process has computed: an unchanged file is not read again. Two writes within one
# tick of the clock give the same times, so the digest of a file that was just written is not kept.
_digests: dict[Identity, str] = {}
_SETTLED_NS = 2_000_000_000  # since its last change, a file counts as no longer being written


def identity(file: int | Path) -> Identity:
    """Return the identity of an open file, or of the file at a path (links are not followed)."""
    stat = os.fstat(file) if isinstance(file, int) else file.lstat()
    return Identity(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """An opened folder with a seal: a bundle or an annex."""

    path: Path
    digest: str
    """The sha256 of `SHA256SUMS`."""
    files: Mapping[str, str] = field(repr=False)
    """The sha256 of each file as the seal lists it, by the file's path in the folder."""
    hashed: Mapping[str, Identity] = field(default_factory=dict, repr=False, compare=False)
    """The identity of each file when its digest was checked: see registry/bundle/pinned.py."""
    holds: tuple[object, ...] = field(default=(), repr=False, compare=False)
    """Objects that keep files in the cache while they live: see registry/store/host_cache.py."""

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Self:
        """Open a sealed folder. Raises a BundleError that names the file if it is not intact."""
        raise NotImplementedError

    def verify(self) -> None:
        """Check again that every file in the folder has the same content as when it was opened."""
        _digests.clear()
        if self.open(self.path).digest != self.digest:
            raise BundleError(
                f"{self.path}: sealed anew since it was opened", code="bundle-altered"
            )


def open_sealed(
    path: str | Path, main: str, *, aside: Collection[str] = (), verify: bool = True
) -> tuple[bytes, Sealed]:
    """Check a sealed folder; return the content of its file `main`, and the opened folder.

    `aside` names subfolders that the seal does not cover. `verify=False` leaves out the digests of
    all files but `main`. Raises BundleError if the folder is not as it was sealed.
    """
    root = Path(path).absolute()
    if not root.is_dir():
        raise BundleError(f"{root}: no such {'bundle' if main == MANIFEST else 'annex'} folder")
    sums = read_sealed(root, SUMS)
    listed = _parse_sums(root, sums, main)
    _require_listing(root, listed, aside)
    content = read_sealed(root, main)
    _require_digest(root, main, listed, hashlib.sha256(content).hexdigest(), len(content))
    hashed: dict[str, Identity] = {}
    names = [name for name in listed if verify and name != main]
    for name, file in zip(names, _hash_files(root, names), strict=True):
        _require_digest(root, name, listed, file.digest, file.identity.size)
        hashed[name] = file.identity
    digest = hashlib.sha256(sums).hexdigest()
    files, identities = MappingProxyType(listed), MappingProxyType(hashed)
    return content, Sealed(path=root, digest=digest, files=files, hashed=identities)


def seal(path: str | Path) -> str:
    """Write `SHA256SUMS` for all files of a folder; return its sha256, the folder's digest."""
    root = Path(path)
    names = sorted(name for name in _list_files(root) if name not in _BESIDE)
    pairs = zip(_hash_files(root, names), names, strict=True)
    sums = "".join(f"{file.digest}  {name}\n" for file, name in pairs).encode()
    (root / SUMS).write_bytes(sums)
    return hashlib.sha256(sums).hexdigest()


def open_file(root: Path, name: str) -> int:
    """Open a plain file; return its descriptor. Raises BundleError for a link or a special file."""
    with _explain_read_errors(root, name):
        return open_plain(root / name)


def read_sealed(root: Path, name: str) -> bytes:
    """Return the content of a plain file. Raises BundleError for a link or a special file."""
    with _explain_read_errors(root, name):
        return read_plain(root / name)


@contextlib.contextmanager
def _explain_read_errors(root: Path, name: str) -> Iterator[None]:
    """Turn errors of opening and reading the file `name` into BundleErrors."""
    try:
        yield
    except FileNotFoundError:
        raise BundleError(f"{root}: {name} is missing", code="bundle-altered") from None
    except OSError as error:
        raise BundleError(f"{root}: cannot read {name}: {error.strerror}") from error


def _hash_files(root: Path, names: Sequence[str]) -> list[Hashed]:
    """Hash each file, in several threads if there is much to hash: hashing releases the GIL."""
    try:
        bytes_to_hash = sum(
            file.size for name in names if (file := identity(root / name)) not in _digests
        )
    except OSError:  # a file was removed since it was listed: reading it raises the error
        bytes_to_hash = 0
    cores = len(os.sched_getaffinity(0))
    if bytes_to_hash < _WORTH_A_THREAD or cores == 1:
        return [_hash_by_name(root, name) for name in names]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(cores, _HASHERS)) as pool:
        return list(pool.map(lambda name: _hash_by_name(root, name), names))


def _hash_by_name(root: Path, name: str) -> Hashed:
    """Hash a file. If this process has hashed it and it did not change, it is not read again."""
    handle, opened_ns = open_file(root, name), time.time_ns()
    try:
        current = identity(handle)
        digest = _digests.get(current)
        if digest is not None:
            return Hashed(digest, current)
        file = hash_file(handle, root, name)
        if opened_ns - max(file.identity.modified_ns, file.identity.changed_ns) > _SETTLED_NS:
            _digests[file.identity] = file.digest
        return file
    finally:
        os.close(handle)


def hash_file(handle: int, root: Path, name: str) -> Hashed:
    """Hash an open file. Raises BundleError if it is changed meanwhile."""
    digest, offset = hashlib.sha256(), 0
    chunk = memoryview(bytearray(_CHUNK))
    with _explain_read_errors(root, name):
        before = identity(handle)
        while count := os.preadv(handle, [chunk], offset):
            digest.update(chunk[:count])
            offset += count
        after = identity(handle)
    if before != after:
        raise BundleError(f"{root}: {name} was changed while it was read", code="bundle-altered")
    return Hashed(digest.hexdigest(), after)


def _require_digest(
    root: Path, name: str, listed: Mapping[str, str], sha256: str, size: int
) -> None:
    """Raise BundleError if `sha256`, that of a file of `size` bytes, is not the listed one."""
    if sha256 != listed[name]:
        raise BundleError(
            f"{root}: {name} is truncated or altered ({size} bytes with sha256 {sha256[:12]}…, "
            f"{SUMS} says {listed[name][:12]}…)",
            code="bundle-altered",
        )


def _require_safe(root: Path, name: str) -> None:
    """Raise BundleError if a file's name could lead out of the folder `root`."""
    try:
        safe_relative(name)
    except ValueError as error:
        raise BundleError(f"{root}: {error}") from None


def _parse_sums(root: Path, content: bytes, main: str) -> dict[str, str]:
    """Read the digest of each file from `content`, the bytes of a seal.

    Raises BundleError if these are no valid seal, or if they do not list the file `main`.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise BundleError(f"{root}: {SUMS} is not text") from None
    if not text.endswith("\n"):
        raise BundleError(
            f"{root}: {SUMS} is truncated: its last line has no end", code="bundle-altered"
        )
    listed: dict[str, str] = {}
    for number, line in enumerate(text[:-1].split("\n"), start=1):
        match = _SUMS_LINE.fullmatch(line)
        if match is None:
            raise BundleError(f"{root}: {SUMS}, line {number}: not '<sha256>  <file>'")
        digest, name = match.groups()
        _require_safe(root, name)
        if name in listed:
            raise BundleError(f"{root}: {SUMS}, line {number}: lists {name} twice")
        listed[name] = digest
    if main not in listed:
        raise BundleError(f"{root}: {SUMS} does not list {main}: not a bundle of this program")
    return listed


def _list_files(root: Path) -> Iterator[str]:
    """Yield the names of all files below `root`, relative to it.

    Raises BundleError for links, special files and unsafe names.
    """
    folders = [root]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                name = Path(entry.path).relative_to(root).as_posix()
                if entry.is_symlink():
                    raise BundleError(f"{root}: {name} is a symbolic link, not allowed in a bundle")
                if entry.is_dir():
                    folders.append(Path(entry.path))
                elif entry.is_file():
                    _require_safe(root, name)
                    yield name
                else:
                    raise BundleError(f"{root}: {name} is not a plain file")


def _require_listing(root: Path, listed: Mapping[str, str], aside: Collection[str]) -> None:
    """Raise BundleError if a listed file is missing, or if a file is there that is not listed.

    Files in the subfolders `aside` are left out.
    """
    try:
        present = {name for name in _list_files(root) if name.partition("/")[0] not in aside}
    except OSError as error:
        raise BundleError(f"cannot read {error.filename}: {error.strerror}") from error
    if missing := sorted(listed.keys() - present):
        raise BundleError(
            f"{root}: {missing[0]} is missing{_count_others(missing)}", code="bundle-altered"
        )
    if extra := sorted(present - listed.keys() - _BESIDE):
        raise BundleError(
            f"{root}: {extra[0]} does not belong to the bundle{_count_others(extra)}",
            code="bundle-altered",
        )


def _count_others(names: list[str]) -> str:
    """Write ` (and 2 more)` for a message that has only the first of three names."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
