"""The errors of engines and targets."""

from __future__ import annotations

import errno

from soa.errors import SoaPipelineError, causes


class EngineError(SoaPipelineError):
    """An engine is unknown or not installed, or cannot build or open this artifact."""

    code = "engine"


class NotApplicableError(EngineError):
    """An engine does not support this model or this target, which is no failure."""

    code = "not-applicable"


class RunError(EngineError):
    """An artifact cannot be opened or run natively, or two threads use the same binding."""

    code = "run"


class CrashError(SoaPipelineError):
    """A user's model, or other code of a user, ended the process in which it ran."""

    code = "crash"


class TargetError(SoaPipelineError):
    """A target is unknown, or this host cannot build or run it."""

    code = "target"


MORE_MEMORY = "give it more memory, or build for fewer rows (rows: max)"
"""The advice at the end of a message that memory ran out."""

# Parts of the messages by which torch's allocators, the C++ runtime, the compiler driver and the
# linker report that memory ran out.
_OUT_OF_MEMORY_PHRASES = (
    "can't allocate memory",
    "cannot allocate memory",
    "std::bad_alloc",
    "out of memory",
    "killed signal terminated program",
    "memory exhausted",
    "ld terminated with signal 9",
)


FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The error numbers that mean a full disk: no space, a quota, or a limit on a file's size."""
_FULL_DISK_PHRASES = ("No space left on device", "Disk quota exceeded")


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception, or one of its causes, says that memory ran out."""
    for cause in causes(error, contexts=True):
        text = str(cause).lower()
        if isinstance(cause, MemoryError):
            return True
        if any(phrase in text for phrase in _OUT_OF_MEMORY_PHRASES):
            return True
    return False


def is_full_disk(error: BaseException) -> bool:
    """True if an exception, or one of its causes, says that a disk or a quota is full."""
    for cause in causes(error, contexts=True):
        text = str(cause)
        if getattr(cause, "errno", None) in FULL_DISK:
            return True
        if any(phrase in text for phrase in _FULL_DISK_PHRASES):
            return True
    return False


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or the name of its type if the text is empty.

    If memory ran out, this is a short message with advice instead.
    """
    if is_out_of_memory(error):
        return f"out of memory: {MORE_MEMORY}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
