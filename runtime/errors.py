"""Errors of the runtime."""

from __future__ import annotations

from soa.errors import SoaPipelineError


class LoadError(SoaPipelineError):
    """A version that cannot be loaded here, or not in this mode."""

    code = "load"


class BindError(SoaPipelineError):
    """Memory that does not fit the signature. An artifact itself does not notice any of these
    faults.
    """

    code = "bind"


class DeviationError(SoaPipelineError):
    """In test mode: an answer differs from the reference, or the run touched other memory."""

    code = "deviation"


class QueueFullError(SoaPipelineError):
    """The queue of a scheduler is full, and its policy is to raise an error."""

    code = "queue-full"
