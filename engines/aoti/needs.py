"""What a library of AOTInductor needs of torch, by the names in it."""

from __future__ import annotations

from mmap import ACCESS_READ, mmap
from pathlib import Path

from engines.errors import EngineError


def needs_proxy_executor(library: Path) -> bool:
    """True if the library calls torch's proxy executor, as operations without a C shim do. Then it
    runs with torch's own runner only."""
    return _names(library, b"aoti_torch_proxy_executor_call_function")


def needs_libtorch(library: Path) -> bool:
    """True if it is linked with libtorch.so, as torch before 2.13 does, not with libtorch_cpu.so
    only."""
    return _names(library, b"\0libtorch.so\0")


def _names(library: Path, name: bytes) -> bool:
    """True if the bytes of the library contain `name`; EngineError if it cannot be read."""
    try:
        with library.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
            return content.find(name) >= 0
    except (OSError, ValueError) as error:
        raise EngineError(f"{library.name} cannot be read: {error}") from error
