"""Whether a library of AOTInductor runs without torch's own runner."""

from __future__ import annotations

from mmap import ACCESS_READ, mmap
from pathlib import Path

from engines.errors import EngineError


def needs_proxy_executor(library: Path) -> bool:
    """True if the library calls torch's proxy executor, as operations without a C shim do."""
    try:
        with library.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
            return content.find(b"aoti_torch_proxy_executor_call_function") >= 0
    except (OSError, ValueError) as error:
        raise EngineError(f"{library.name} cannot be read: {error}") from error
