"""What can go wrong with an engine or a target."""

from __future__ import annotations

from soa.errors import SoaPipelineError


class EngineError(SoaPipelineError):
    """An engine that is unknown, not installed, or cannot build or open this artifact."""


class RunError(EngineError):
    """An artifact that cannot be opened or run natively, or a binding that two threads use."""


class TargetError(SoaPipelineError):
    """A target that is unknown, or that this host cannot build or run."""


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
