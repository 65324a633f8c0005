"""What can go wrong with an engine or a target."""

from __future__ import annotations

from soa.errors import SoaPipelineError


class EngineError(SoaPipelineError):
    """An engine that is unknown, not installed, or cannot build or open this artifact."""

    code = "engine"


class NotApplicableError(EngineError):
    """An engine that is not for this model or this target; nothing broke."""

    code = "not-applicable"


class RunError(EngineError):
    """An artifact that cannot be opened or run natively, or a binding that two threads use."""

    code = "run"


class TargetError(SoaPipelineError):
    """A target that is unknown, or that this host cannot build or run."""

    code = "target"


MORE_MEMORY = "give it more memory, or build for fewer rows (rows: max)"
"""What to do where memory ran out."""

# How torch's allocators, the C++ runtime, the compiler driver and the linker say it.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "std::bad_alloc",
    "out of memory",
    "killed signal terminated program",
    "memory exhausted",
    "ld terminated with signal 9",
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that caused it, says that memory ran out."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower()
        if isinstance(seen, MemoryError) or any(said in text for said in _OUT_OF_MEMORY):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, or its type where it says nothing.

    Where memory ran out, that and what to do, in place of a library's many words.
    """
    if out_of_memory(error):
        return f"out of memory: {MORE_MEMORY}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
