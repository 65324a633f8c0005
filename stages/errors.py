"""Errors of the stages."""

from __future__ import annotations

from soa.errors import SoaPipelineError


class SourceError(SoaPipelineError):
    """A model that cannot be built: its factory, its arguments or its weights."""

    code = "source"


class CaptureError(SoaPipelineError):
    """A model that cannot become a program in the calling convention."""

    code = "capture"


class ReferenceDataError(SoaPipelineError):
    """A reference that does not fit the signature, or that proves nothing."""

    code = "reference-data"


class StageError(SoaPipelineError):
    """A stage that ended without a usable result."""

    code = "stage"


class NotMeasuredError(SoaPipelineError):
    """A measurement that would judge a version ended for want of memory or time: nothing was
    decided."""

    code = "not-measured"


class MetricError(SoaPipelineError):
    """A metric without a value, because of its labelled data, its function or the result."""

    code = "metric"
