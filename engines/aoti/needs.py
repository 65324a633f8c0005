"""What a library of AOTInductor needs of torch: the names of functions and libraries in it tell."""

from __future__ import annotations

from mmap import ACCESS_READ, mmap
from pathlib import Path

from engines.errors import EngineError


def needs_proxy_executor(library: Path) -> bool:
    """True if the library calls torch's proxy executor, as operations without a C shim do. Then it
    runs with torch's own runner only."""
    return _contains(library, b"aoti_torch_proxy_executor_call_function")


def needs_libtorch(library: Path) -> bool:
    """True if the library is linked with libtorch.so, as torch before 2.13 does. Later ones link
    only libtorch_cpu.so."""
    return _contains(library, b"\0libtorch.so\0")


def _contains(library: Path, name: bytes) -> bool:
    """True if the bytes of the library contain `name`. Raises EngineError if it cannot be read."""
    try:
        with library.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
            return content.find(name) >= 0
    except (OSError, ValueError) as error:
        raise EngineError(f"{library.name} cannot be read: {error}") from error
