"""Atomic writing of a folder: it appears complete and on disk, or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from registry.errors import BundleError, RegistryUnavailableError

# Errors that a user can fix; others are faults of the program.
_FULL_OR_FAILING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR,
                 errno.EEXIST, errno.ENAMETOOLONG)  # fmt: skip


@contextlib.contextmanager
def write_atomically(
    dest: str | Path, *, replace: bool = False, resume: str = ""
) -> Iterator[Path]:
    """Yield an empty folder next to `dest`, which becomes `dest` when the block ends.

    Then it is written to disk (fsync) and renamed. After an exception it is removed. An existing
    `dest` is refused before the block runs, unless `replace`. Errors such as a full disk become a
    BundleError with a message of one line.

    `resume`: the name of this work. After a RegistryUnavailableError or Ctrl-C the folder stays as
    it is, and a later call with the same name yields it again. One process at a time has it.
    """
    final = Path(dest).absolute()
    partial = final.parent / f".{final.name}.{resume or os.urandom(4).hex()}.partial"
    with _explain_disk_errors(final):
        if not replace and os.path.lexists(final):
            raise BundleError(f"{final}: exists already")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise BundleError(f"cannot write {final}: {final.parent} is not a folder") from None
        try:
            partial.mkdir(exist_ok=bool(resume))
        except FileNotFoundError as error:  # in /proc, or if somebody has removed the parent
            raise BundleError(f"cannot write {final}: {error.strerror}: {final.parent}") from None
        with _hold_folder(partial) if resume else contextlib.nullcontext():
            try:
                yield partial
                _sync_tree(partial)
                _move_into_place(partial, final, replace=replace)
            except BaseException as error:
                if not (resume and isinstance(error, RegistryUnavailableError | KeyboardInterrupt)):
                    shutil.rmtree(partial, ignore_errors=True)
                raise
        _sync_to_disk(final.parent)


@contextlib.contextmanager
def _hold_folder(partial: Path) -> Iterator[None]:
    """Keep other processes from using a folder during the block.

    The folder's name could be foreseen, so it may be in use: raises BundleError if it belongs to
    another user, RegistryUnavailableError if another process holds it.
    """
    handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise BundleError(f"{partial}: belongs to another user; it was not used")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RegistryUnavailableError(f"{partial}: another process is writing it") from None
        except OSError:
            pass  # NFS cannot lock folders: there, two processes do not notice each other
        yield
    finally:
        os.close(handle)


def _move_into_place(partial: Path, final: Path, *, replace: bool) -> None:
    """Rename `partial` to `final`. An existing `final` is replaced, or refused unless `replace`.

    If the rename fails, the existing one stays.
    """
    if not os.path.lexists(final):
        partial.rename(final)
        return
    if not replace:  # rename(2) would silently replace an empty folder made in the meantime
        raise BundleError(f"{final}: exists already")
    aside = partial.with_suffix(".old")
    final.rename(aside)
    try:
        partial.rename(final)
    except BaseException:
        aside.rename(final)
        raise
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink()


@contextlib.contextmanager
def _explain_disk_errors(dest: Path) -> Iterator[None]:
    """Turn errors in the block that a user can mend, as a full disk, into BundleErrors."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*_FULL_OR_FAILING, *_NOT_WRITABLE):
            raise
        raise BundleError(f"cannot write {dest}: {os.strerror(error.errno or 0)}") from error


def _sync_tree(root: Path) -> None:
    """Write all files and folders below `root` to the disk, and `root` itself."""
    for folder, _, names in os.walk(root):
        for name in names:
            _sync_to_disk(Path(folder, name))
        _sync_to_disk(Path(folder))


def _sync_to_disk(path: Path) -> None:
    """Write a file, or the entries of a folder, to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
