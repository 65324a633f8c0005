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
    """Open a regular file for reading and return its descriptor.

    `links`: whether the last part of the path may be a symbolic link. Raises OSError for any other
    kind of file, such as a pipe, on which this never waits.
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
    """Return the content of a regular file.

    Raises OSError for any other kind of file, and for more than `largest` bytes; None: no limit.
    """
    with os.fdopen(open_plain(path, links=links), "rb") as file:
        content = file.read(-1 if largest is None else largest + 1)
    if largest is not None and len(content) > largest:
        raise OSError(errno.EINVAL, f"is larger than {largest} bytes", str(path))
    return content


Inode = tuple[int, int]
"""The device and the number of a file. A new file at the same path has another inode."""


def inode_of(file: Path | int) -> Inode | None:
    """Return the inode of the file at a path, or of an open file; None if there is no file."""
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def digest_of(path: str | Path) -> str:
    """Return the sha256 of a regular file as hexadecimal text; raise OSError for other files."""
    with os.fdopen(open_plain(path, links=True), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_zip(path: str | Path) -> None:
    """Compare each member of a zip file, such as a `.npz` or `.pt2`, with its checksum (CRC-32).

    Raises zipfile.BadZipFile if one differs or cannot be read. torch compares no checksum, and
    NumPy not all. This takes about a second for each gigabyte. A file that is no zip, as old
    versions of torch wrote, has no checksums and is accepted.
    """
    import zipfile

    with os.fdopen(open_plain(path, links=True), "rb") as file:
        if file.read(4) != b"PK\3\4":
            return
        with _bad_zip_errors(), zipfile.ZipFile(file) as archive:
            check_members(archive, archive.namelist())


def check_members(archive: zipfile.ZipFile, names: Iterable[str]) -> None:
    """Compare members of an open zip with their checksums; raise zipfile.BadZipFile if one differs.

    If the checksum of every member is 0, none was written, as after
    `torch.serialization.set_crc32_options(False)`. Then nothing is compared.
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
    """Turn every error that is raised inside the `with` block into zipfile.BadZipFile."""
    import zipfile

    try:
        yield
    except zipfile.BadZipFile:
        raise
    except Exception as error:  # each kind of compression has its own
        raise zipfile.BadZipFile(f"a damaged zip: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all, even if the disk is full or the process is killed.

    The text goes to a new file beside it, which then takes its place.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
