"""Open and read files that others may have written, turn JSON into records, and write our own."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

LARGEST_RECORD = 64 << 20
"""Bytes of a record, a note, a key or a config: more is none of ours."""

T = TypeVar("T")


def open_plain(path: str | Path, *, links: bool = False) -> int:
    """A descriptor of a regular file, to read; OSError for anything else.

    `links`: whether the last part of the path may be a symbolic link. A pipe does not make it wait.
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


def digest_of(path: str | Path) -> str:
    """The sha256 of a regular file; OSError for anything else."""
    with os.fdopen(open_plain(path, links=True), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there complete or not at all, also on a full disk or after a kill."""
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def parse_json(content: bytes | str) -> Any:
    """JSON data, nested no deeper than 200; ValueError for what is not that."""
    from pydantic_core import from_json

    return from_json(
        content.encode(errors="surrogatepass") if isinstance(content, str) else content
    )


def read_record(kind: type[T], content: bytes | str) -> T:
    """As `as_record`, from JSON; each value is of the very type that `kind` says: "5" is no 5."""
    from pydantic_core import to_json

    once = to_json(parse_json(content), inf_nan_mode="constants")  # of equal keys the last counts
    return _validated(kind, lambda adapter: adapter.validate_json(once, strict=True))


def as_record(kind: type[T], data: Any) -> T:
    """`data` as a dataclass, a pydantic model, or whatever else pydantic knows by its annotation.

    ValueError, in one line, names the first field that is not what `kind` says.
    """
    return _validated(kind, lambda adapter: adapter.validate_python(data))


def _validated(kind: type[T], validate: Callable[[TypeAdapter[Any]], Any]) -> T:
    from pydantic import ValidationError

    try:
        found: T = validate(_adapter(kind))  # type: ignore[arg-type]  # a type has a hash
        return found
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "(top level)"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ValueError(f"{field}: {first['msg']}{more}") from error


def as_data(record: Any) -> dict[str, Any]:
    """A dataclass as data for JSON, with its fields in order."""
    adapter = _adapter(type(record))  # type: ignore[arg-type]  # a type has a hash
    found: dict[str, Any] = adapter.dump_python(record, mode="json", warnings=False)
    return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
