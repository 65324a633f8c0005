"""Open and read files that others may have written, and write our own."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zipfile

LARGEST_RECORD = 64 << 20
"""The most bytes that a record, a note, a key or a config may have. Larger files are refused."""


def open_plain(path: str | Path, *, links: bool = False) -> int:
    """Open a regular file and return its descriptor for reading; OSError for any other file.

    `links`: whether the last part of the path may be a symbolic link. The call never waits on a
    pipe.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.ELOOP, "is a symbolic link", str(path)) from None
        raise
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a plain file", str(path))
    return handle


def read_plain(
    path: str | Path, *, links: bool = False, largest: int | None = LARGEST_RECORD
) -> bytes:
    """The content of a regular file of at most `largest` bytes; raises OSError otherwise."""
    with os.fdopen(open_plain(path, links=links), "rb") as file:
        content = file.read(-1 if largest is None else largest + 1)
    if largest is not None and len(content) > largest:
        raise OSError(errno.EINVAL, f"is larger than {largest} bytes", str(path))
    return content


Inode = tuple[int, int]
"""The device and the number of a file: another file at the same path has another one."""


def inode_of(file: Path | int) -> Inode | None:
    """The inode of the file at a path, or of an open file; None if there is no file."""
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def digest_of(path: str | Path) -> str:
    """The sha256 of a regular file; OSError for any other kind of file."""
    with os.fdopen(open_plain(path, links=True), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_zip(path: str | Path) -> None:
    """Compare the members of a zip, such as a `.npz` or `.pt2`, with their CRC-32.

    Raises zipfile.BadZipFile if one differs or cannot be read: torch compares none, and NumPy not
    all. A gigabyte takes about a second. A file that is no zip, as old versions of torch wrote, has
    nothing to compare.
    """
    import zipfile

    with os.fdopen(open_plain(path, links=True), "rb") as file:
        if file.read(4) != b"PK\3\4":
            return
        with _bad_zip_errors(), zipfile.ZipFile(file) as archive:
            check_members(archive, archive.namelist())


def check_members(archive: zipfile.ZipFile, names: Iterable[str]) -> None:
    """Compare members of an open zip with their CRC-32. Raises zipfile.BadZipFile if one differs.

    If the sums of all members are 0, they were not written
    (`torch.serialization.set_crc32_options(False)`), and nothing is compared.
    """
    if not any(member.CRC for member in archive.infolist()):
        return
    with _bad_zip_errors():
        for name in names:
            with archive.open(name) as content:
                while content.read(1 << 20):  # zipfile compares the sum at the end of a member
                    pass


@contextmanager
def _bad_zip_errors() -> Iterator[None]:
    """Turns every error that is raised inside the `with` block into zipfile.BadZipFile."""
    import zipfile

    try:
        yield
    except zipfile.BadZipFile:
        raise
    except Exception as error:  # each kind of compression has its own
        raise zipfile.BadZipFile(f"a damaged zip: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is complete or absent, even after a full disk or a kill."""
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
