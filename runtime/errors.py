"""Errors of the runtime."""

from __future__ import annotations

from soa.errors import SoaPipelineError


class LoadError(SoaPipelineError):
    """A version cannot be loaded on this host, or not in this mode."""

    code = "load"


class BindError(SoaPipelineError):
    """Memory does not fit the model's signature.

    It is refused before the run, since an artifact itself notices none of these faults.
    """

    code = "bind"


class DeviationError(SoaPipelineError):
    """In test mode: an answer differs from the reference, or the run touched other memory."""

    code = "deviation"


class QueueFullError(SoaPipelineError):
    """The queue of a scheduler is full, and its policy is to raise an error."""

    code = "queue-full"
