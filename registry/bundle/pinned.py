"""Opening what was hashed: files of a bundle, held open, under paths that lead to nothing else.

A digest is checked when the bundle is opened; an engine opens the path later. In between a file may
be replaced. So the file is opened once more and must be the one that was hashed: the same device,
inode, size and times, of which a write or a replacement changes at least one. The engine gets a
folder of links to `/proc/self/fd/N`, so it opens that very file, whatever is renamed or replaced
later. Nothing is copied, and processes still share the pages. A file that is another one by now is
hashed again: it may have been replaced by an equal one, or a network's file system may have given
it another inode.

One gap is left. A write into the file itself, between our last check and the engine's opening, is
found only afterwards; through a shared mapping, or within one tick of the kernel's clock, not even
then; and in pages that are mapped already, never. Files that nobody may write (CVMFS, a read-only
mount, another user's) have no such gap.
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


def _links_in() -> str | None:
    """The place for temporary folders of links: in memory if possible, else Python's default."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


class Pinned:
    """Some files of a bundle, until `close`. `file(name)` is the path to open instead of its own:
    for this process, also after a fork, or, `for_others`, for those that it starts while it lives.

    Of a bundle that was opened without digests, the files are held as they are found.
    """

    def __init__(self, bundle: Bundle, names: Iterable[str], *, for_others: bool = False) -> None:
        self._bundle = bundle
        self._owner = str(os.getpid()) if for_others else "self"
        self._held: dict[str, tuple[int, Identity]] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="soa-pinned-", dir=_links_in()))
        try:
            for name in names:
                self._hold(name)
            self.check()
        except BaseException:
            self.close()
            raise

    def file(self, name: str) -> Path:
        return self.folder / name

    def check(self) -> None:
        """BundleError if a file is not what was hashed, or has been written to since."""
        for name, (handle, was) in self._held.items():
            if identity(handle) != was:
                raise self._changed(name)

    def close(self) -> None:
        for handle, _ in self._held.values():
            os.close(handle)
        self._held.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _hold(self, name: str) -> None:
        if name in self._held:
            return
        root, inside = self._bundle.place(name)  # refuses a name that is not the bundle's
        handle = open_file(root, inside)
        now = identity(handle)
        self._held[name] = handle, now
        if self._bundle.hashed.get(name, now) != now:
            digest, now = hash_file(handle, root, inside)
            self._held[name] = handle, now
            if digest != self._bundle.files[name]:
                raise self._changed(name)
        self.file(name).parent.mkdir(parents=True, exist_ok=True)
        self.file(name).symlink_to(f"/proc/{self._owner}/fd/{handle}")

    def _changed(self, name: str) -> BundleError:
        return BundleError(
            f"{self._bundle.path}: {name} was changed after its digest was checked",
            code="bundle-altered",
        )
