"""What the runtime refuses."""

from __future__ import annotations

from soa.errors import SoaPipelineError


class LoadError(SoaPipelineError):
    """A version that cannot be loaded here, or not in this mode."""

    code = "load"


class BindError(SoaPipelineError):
    """Memory that does not fit the signature: everything an artifact itself would not notice."""

    code = "bind"


class DeviationError(SoaPipelineError):
    """In test mode: an event whose answer is not the reference's, or memory that was touched."""

    code = "deviation"


class QueueFullError(SoaPipelineError):
    """A scheduler whose queue is full, and that was told to say so rather than to wait."""

    code = "queue-full"
