"""The cache of a host: sealed folders (bundles, annexes), named by digest, for all processes.

An entry is written into a temporary folder next to it, checked, and renamed, so it is complete or
does not exist. One process fetches it, under a file lock that the kernel releases when the process
dies; the others wait for it. The next process that fetches removes the files of a killed one.

A process holds a shared lock (flock) on the `SHA256SUMS` of an entry while it uses the entry. If
the cache is larger than its limit, entries that no process uses are evicted, the least recently
used first. Using an entry changes only the time of its folder, so a read-only cache works too.

Entries are not trusted: they are opened like any sealed folder, with every digest checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from registry.bundle import SUMS, write_atomically
from registry.errors import BundleError, NotCachedError, RegistryError, RegistryUnavailableError
from soa.files import Inode, inode_of, open_plain

CACHE_VARIABLE = "PIPELINE_CACHE"
SIZE_VARIABLE = "PIPELINE_CACHE_SIZE"
DEFAULT_SIZE = "20GB"
FETCH_WAIT_S = 1800.0
"""How long to wait for another process that is fetching the same entry."""

Fill = Callable[[Path], object]
"""Writes the sealed folder into an empty one, and raises if it is not the requested one."""

_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LEFTOVER = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{8}\.(?:partial|old)")


class EntryInUse:
    """An entry that this process uses. It stays until `release`, or until this object is deleted.

    `handle`: the open `SHA256SUMS` of the entry, which this object closes.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self.inode = inode_of(handle)
        self.release = weakref.finalize(self, os.close, handle)


@dataclass(frozen=True)
class Entry:
    """An entry of the cache. `size`: in bytes. `used`: the time of its last use (UTC)."""

    digest: str
    size: int
    used: datetime
    in_use: bool


class Cache:
    """The entries in the folder `root`, which is created with the first entry."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def hold(self, digest: str, fill: Fill | None) -> EntryInUse:
        """Return the entry with this digest, in use from now on.

        If it does not exist, one process fills it by `fill`. Raises NotCachedError if it does not
        exist and `fill` is None.
        """
        if not _DIGEST.fullmatch(digest):
            raise BundleError(f"{digest!r} is not a digest")
        entry = self._hold_existing(digest)
        if entry is not None:
            return entry
        if fill is None:
            raise NotCachedError(f"{digest[:12]}… is not in the cache {self.root}")
        while entry is None:  # another process may evict it before we hold it
            self._fill(digest, fill, instead_of=None)
            entry = self._hold_existing(digest)
        self.shrink(cache_size_limit())
        return entry

    def refill(self, damaged: EntryInUse, fill: Fill) -> EntryInUse:
        """Replace a damaged entry, unless another process has replaced it already."""
        digest = damaged.path.name
        self._fill(digest, fill, instead_of=damaged.inode)
        return self.hold(digest, fill)

    def entries(self) -> list[Entry]:
        """Return all entries, the least recently used first."""
        entries = []
        for path in self._find_children(_DIGEST):
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                used = datetime.fromtimestamp(path.stat().st_mtime, UTC)
                with self._try_to_lock(path) as unused:
                    entries.append(Entry(path.name, _folder_size(path), used, not unused))
        return sorted(entries, key=lambda entry: entry.used)

    def shrink(self, limit: int) -> list[Entry]:
        """Evict unused entries until at most `limit` bytes are left; return the evicted entries."""
        self._sweep_all()
        entries = self.entries()
        total = sum(entry.size for entry in entries)
        evicted = []
        for entry in entries:
            if total <= limit:
                break
            if self._evict(entry.digest):
                total -= entry.size
                evicted.append(entry)
        return evicted

    def _hold_existing(self, digest: str) -> EntryInUse | None:
        """Return the entry, in use from now on; None if there is none with a `SHA256SUMS`."""
        path = self.root / digest
        while True:
            try:
                handle = open_plain(path / SUMS)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                raise BundleError(f"cannot read {path / SUMS}: {error.strerror}") from error
            entry = EntryInUse(path, handle)
            fcntl.flock(handle, fcntl.LOCK_SH)
            if inode_of(path / SUMS) == entry.inode:
                with contextlib.suppress(OSError):  # a read-only cache
                    os.utime(path)
                return entry
            entry.release()  # evicted or replaced while we waited

    def _fill(self, digest: str, fill: Fill, instead_of: Inode | None) -> None:
        """Fill an entry, unless another process has done it meanwhile.

        `instead_of`: the inode of the `SHA256SUMS` that is replaced; None if there was no entry.
        """
        cache_size_limit()  # raises for a wrong setting before anything is fetched
        path = self.root / digest
        with self._hold_fetch_lock(digest):
            if path.is_dir() and inode_of(path / SUMS) != instead_of:
                return
            self._sweep(digest)
            with write_atomically(path, replace=path.is_dir()) as partial:
                fill(partial)

    @contextlib.contextmanager
    def _hold_fetch_lock(self, digest: str, wait_s: float | None = None) -> Iterator[None]:
        """Hold the lock for filling an entry, for which it waits `wait_s`, or else FETCH_WAIT_S.

        Raises RegistryUnavailableError if another process keeps the lock.
        """
        from filelock import FileLock, Timeout  # here: not needed for reading the cache

        wait_s = FETCH_WAIT_S if wait_s is None else wait_s
        lock = FileLock(self.root / f".{digest}.lock", timeout=wait_s)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            acquired = lock.acquire()
        except Timeout:
            raise RegistryUnavailableError(
                f"cache {self.root}: another process has been fetching {digest[:12]}… for "
                f"{wait_s:g} s: stop it, or try again"
            ) from None
        except OSError as error:
            raise BundleError(
                f"cannot use the cache {self.root}: {error.strerror}: name another folder with "
                f"{CACHE_VARIABLE}"
            ) from error
        with acquired:
            yield

    @contextlib.contextmanager
    def _try_to_lock(self, path: Path) -> Iterator[bool]:
        """Yield whether no process uses the entry. If so, none can begin to within the block."""
        try:
            handle = os.open(path / SUMS, os.O_RDWR | os.O_NOFOLLOW)
        except PermissionError:  # it belongs to another user: we cannot evict it
            yield False
            return
        except FileNotFoundError:  # an entry without SHA256SUMS cannot be in use
            yield True
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
        finally:
            os.close(handle)

    def _evict(self, digest: str) -> bool:
        """Remove an entry that nobody uses; return False if it is in use or cannot be removed."""
        path = self.root / digest
        aside = self.root / f".{digest}.{os.urandom(4).hex()}.old"
        with self._try_to_lock(path) as unused:
            if not unused:
                return False
            try:
                path.rename(aside)
            except OSError:  # already removed, or it belongs to another user
                return False
        shutil.rmtree(aside, ignore_errors=True)
        return True

    def _sweep(self, digest: str) -> None:
        """Remove the files that a killed process left of an entry.

        The caller holds `_hold_fetch_lock`, so no other process is filling the entry.
        """
        for path in self._find_children(_LEFTOVER):
            if path.name.startswith(f".{digest}."):
                shutil.rmtree(path, ignore_errors=True)

    def _sweep_all(self) -> None:
        """Remove the files that killed processes left, except of entries that are being filled."""
        for digest in {path.name.split(".")[1] for path in self._find_children(_LEFTOVER)}:
            with (
                contextlib.suppress(RegistryUnavailableError, BundleError),
                self._hold_fetch_lock(
                    digest, wait_s=0
                ),  # raises if another process is filling the entry
            ):
                self._sweep(digest)

    def _find_children(self, pattern: re.Pattern[str]) -> list[Path]:
        """Return the paths in the cache's folder whose name matches; none if there is no folder."""
        try:
            return [path for path in self.root.iterdir() if pattern.fullmatch(path.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []


def cache_root(cache: str | Path | None = None) -> Path:
    """Return the folder of this host's cache: `cache`, or if that is None, PIPELINE_CACHE.

    Without both, it is `soa-pipeline` in XDG_CACHE_HOME if that is an absolute path, else in
    `~/.cache`.
    """
    if chosen := cache or os.environ.get(CACHE_VARIABLE):
        return Path(chosen).absolute()
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "soa-pipeline"


def cache_size_limit() -> int:
    """Return the most bytes that all entries may have: PIPELINE_CACHE_SIZE, by default 20 GB.

    Raises RegistryError if the variable is no size.
    """
    return parse_size(os.environ.get(SIZE_VARIABLE) or DEFAULT_SIZE, SIZE_VARIABLE)


def parse_size(text: str, where: str) -> int:
    """Read a size such as `500MB` or `20GB` as bytes. Raises RegistryError, which names `where`."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?) ?(kB|MB|GB|TB)", text)
    if match is None:
        raise RegistryError(f"{where}: found {text!r}; write a number and kB, MB, GB or TB")
    return int(float(match[1]) * _UNITS[match[2]])


def _folder_size(folder: Path) -> int:
    """Return the size of all files below `folder`, in bytes."""
    return sum(
        Path(parent, name).stat().st_size for parent, _, names in os.walk(folder) for name in names
    )
