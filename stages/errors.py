"""Errors of the stages."""

from __future__ import annotations

from soa.errors import SoaPipelineError


class SourceError(SoaPipelineError):
    """A model that cannot be built: its factory, its arguments or its weights."""

    code = "source"


class CaptureError(SoaPipelineError):
    """A model that cannot be exported as a program in the calling convention."""

    code = "capture"


class ReferenceDataError(SoaPipelineError):
    """A reference that does not fit the signature, or with which a wrong artifact
    would pass."""

    code = "reference-data"


class StageError(SoaPipelineError):
    """A stage that ended without a usable result."""

    code = "stage"


class NotMeasuredError(SoaPipelineError):
    """A measurement ended because memory or time ran out, so nothing was decided about the
    version."""

    code = "not-measured"


class MetricError(SoaPipelineError):
    """A metric that gives no finite number: its labelled data, its function or the result is at
    fault."""

    code = "metric"
