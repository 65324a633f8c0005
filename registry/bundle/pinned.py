"""Pinned files: an engine opens exactly the files whose digests were checked.

A digest is checked when the bundle is opened, but an engine opens the path later, and meanwhile the
file may be replaced. So the file is opened once more and must be the one that was hashed: the same
device, inode, size and times. A write or a replacement changes at least one of these. The engine
gets a folder of links to `/proc/self/fd/N`, so it opens that same file, even if paths are renamed
or replaced later. Nothing is copied, and processes still share the memory pages. If the identity
of a file has changed, the file is hashed again: it may have been replaced by an equal one, or a
network file system may have given it another inode.

One gap is left: a write into the file itself, between our last check and the moment when the engine
opens it. `check` finds such a write only afterwards. It does not find one through a shared mapping
or within one tick of the kernel's clock, and no check finds one in pages that are already mapped.
Files that cannot be written (CVMFS, a read-only mount, files of another user) have no such gap.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from registry.bundle.bundle import Bundle
from registry.bundle.digests import Identity, hash_file, identity, open_file
from registry.errors import BundleError


class Pinned:
    """Holds some files of a bundle open until `close`.

    `file(name)` is the path to open instead of the file's own path. It works in this process and in
    its forks. With `for_others` it works instead in other processes that this one starts, as long
    as this one lives.

    If the bundle was opened without checking digests, the files are held as they are now.
    """

    def __init__(self, bundle: Bundle, names: Iterable[str], *, for_others: bool = False) -> None:
        self._bundle = bundle
        self._owner = str(os.getpid()) if for_others else "self"
        self._handles: dict[str, int] = {}
        self._identities: dict[str, Identity] = {}
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="soa-pinned-", dir=memory))
        try:
            for name in names:
                self._hold(name)
            self.check()
        except BaseException:
            self.close()
            raise

    def file(self, name: str) -> Path:
        """Return the path by which an engine opens the file `name` of the bundle."""
        return self.folder / name

    def check(self) -> None:
        """Raise BundleError if a file has been changed since it was pinned."""
        for name, handle in self._handles.items():
            if identity(handle) != self._identities[name]:
                raise self._changed_error(name)

    def close(self) -> None:
        """Close the files and remove the folder of links. It may be called twice."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _hold(self, name: str) -> None:
        """Open a file and link it into the folder; hash it again if it changed since it was hashed.

        Raises BundleError if its content is another one.
        """
        if name in self._handles:
            return
        root, name_there = self._bundle.place(name)  # raises if the bundle has no such file
        handle = self._handles[name] = open_file(root, name_there)
        now = self._identities[name] = identity(handle)
        if self._bundle.hashed.get(name, now) != now:
            file = hash_file(handle, root, name_there)
            self._identities[name] = file.identity
            if file.digest != self._bundle.files[name]:
                raise self._changed_error(name)
        self.file(name).parent.mkdir(parents=True, exist_ok=True)
        self.file(name).symlink_to(f"/proc/{self._owner}/fd/{handle}")

    def _changed_error(self, name: str) -> BundleError:
        """Return the error for a file that is not the one whose digest was checked."""
        return BundleError(
            f"{self._bundle.path}: {name} was changed after its digest was checked",
            code="bundle-altered",
        )
