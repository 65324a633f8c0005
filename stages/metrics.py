"""Metrics: numbers such as an efficiency, computed from labels and a model's outputs."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.errors import first_line
from soa.errors import needs_extra
from stages.errors import MetricError
from stages.histogram import Histogram
from stages.model import load_callable
from stages.reports import Curve, NotDrawn, Residual, Roc

Values = npt.NDArray[Any]
_POINTS = 100


class Form(Enum):
    """What a function takes besides labels. OWN: a function of the user's, which takes anything."""

    SCORE = auto()
    VALUE = auto()
    CLASS = auto()
    OWN = auto()


@dataclass(frozen=True)
class Metric:
    """`function(labels, output, **kwargs)`: a scikit-learn name, `efficiency`, `resolution`, or a
    callable as `file.py:name` or `module:name`, which also gets `column(name)` for other columns.

    Labels are `(rows,)`. With `signal`, a label equal to it becomes 1, any other 0. `output` is an
    output column, `(rows,)`, or a block, `(rows, columns)`. A function of classes gets the bools
    output > `threshold`; for several columns it gets the index of the largest one in each row.
    """

    name: str
    function: str
    output: str
    label: str
    signal: int | None = None
    threshold: float | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def check(self, labels: Values) -> None:
        """Refuse labels that would give every model the same value or no value.

        Raises MetricError, SourceError.
        """
        _, form = self._function()
        if form is not Form.OWN and (missing := int(np.sum(np.isnan(labels)))):
            raise MetricError(
                f"metric {self.name!r}: the label {self.label!r} is NaN in {missing} of "
                f"{len(labels)} rows: leave these out of the file"
            )
        if form is Form.SCORE and len(np.unique(self._of(labels))) < 2:
            one = f"every label {self.label!r} is {labels[0]}"
            if self.signal is not None:
                one = f"of the labels {self.label!r} all or none are {self.signal}"
            raise MetricError(f"metric {self.name!r}: {self.function} needs two classes, and {one}")

    def value(self, labels: Values, output: Values, column: Callable[[str], Values]) -> float:
        """The metric's value. Raises MetricError if it is not a finite number."""
        where = f"metric {self.name!r}: {self.function}"
        function, form = self._function()
        if len(output) != len(labels):
            raise MetricError(f"{where}: {len(labels)} labels, {len(output)} rows of outputs")
        if form is Form.CLASS and output.ndim > 1:
            output = output.argmax(1)
        elif form is Form.CLASS and self.threshold is not None:
            output = output > self.threshold
        more = [lambda name: _own(column(name))] if form is Form.OWN else []
        given = _own(self._of(labels)), _own(output)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                returned = function(*given, *more, **deepcopy(dict(self.kwargs)))
        except Exception as error:
            text = f"{type(error).__name__}: {first_line(error)}"
            if "read-only" in text:
                text += "; it may not write into what it is given: let it take a copy"
            raise MetricError(f"{where} failed: {text}") from error
        try:
            number = float(returned)
        except (TypeError, ValueError):
            kind = type(returned).__name__
            raise MetricError(f"{where} gave a {kind}, not a number") from None
        if not math.isfinite(number):
            raise MetricError(f"{where} gave {number} on {len(labels)} rows")
        return number

    def curve(self, labels: Values, output: Values) -> Curve:
        """The ROC of a score, the residuals of a regression; or why no curve is drawn."""
        _, form = self._function()
        if form is Form.OWN:
            return NotDrawn("it is a function of your own, and only scores and residuals are drawn")
        if output.ndim > 1:
            return NotDrawn(f"{self.output} has several columns")
        known = self._of(labels)
        if form is Form.CLASS and self.threshold is not None:
            form = Form.SCORE
        if form is Form.SCORE:
            return roc(known == (1 if self.function == "efficiency" else known.max()), output)
        if form is Form.VALUE or (form is Form.CLASS and output.dtype.kind == "f"):
            return residual(known, output, bool(self.kwargs.get("relative", False)))
        return NotDrawn(f"{self.output} is a class, and only scores and residuals are drawn")

    def _of(self, labels: Values) -> Values:
        return labels if self.signal is None else (labels == self.signal).astype(np.int64)

    def _function(self) -> tuple[Callable[..., Any], Form]:
        """The function, and the form of output that it takes."""
        if ":" in self.function:
            return load_callable(self.function), Form.OWN
        if self.function == "efficiency":
            return efficiency, Form.SCORE
        if self.function == "resolution":
            return resolution, Form.VALUE
        with needs_extra("metrics", MetricError):
            from sklearn import metrics
        name = self.function
        function = getattr(metrics, f"{name}_score", None) or getattr(metrics, name, None)
        parameters = list(inspect.signature(function).parameters) if callable(function) else []
        if function is None or parameters[:1] != ["y_true"]:
            raise MetricError(
                f"metric {self.name!r}: {name!r} is neither efficiency, resolution nor a function "
                "of labels and outputs in sklearn.metrics; for your own write file.py:callable"
            )
        of_classes = parameters[1] == "y_pred" and name != "log_loss"
        return function, Form.CLASS if of_classes else Form.SCORE


def _own(values: Values) -> Values:
    """A read-only copy for one function, which can then not change the values for the others."""
    copy = values.copy()
    copy.flags.writeable = False
    return copy


def efficiency(
    labels: Values, scores: Values, background: float | None = None, threshold: float = math.nan
) -> float:
    """The fraction of signal (label 1) with a score above `threshold`. With `background`, the
    threshold is the lowest one above which at most this fraction of all other rows lies."""
    signal = labels == 1
    if background is not None:
        other = np.sort(scores[~signal])
        passing = int(background * len(other) + 1e-9)  # 0.29 * 100 is a little less than 29
        threshold = float(other[max(len(other) - 1 - passing, 0)])
    return float(np.mean(scores[signal] > threshold))


def roc(signal: Values, scores: Values) -> Roc | NotDrawn:
    """The ROC curve, with enough points for a plot with a linear or a logarithmic axis."""
    order = np.argsort(-scores.astype(np.float64), kind="stable")
    ranked, passing = scores[order], signal[order]
    if passing.all() or not passing.any():
        return NotDrawn(f"the labelled rows have no {'background' if passing.all() else 'signal'}")
    ends = np.append(ranked[1:] != ranked[:-1], True)  # rows with equal scores pass together
    kept, fake = np.cumsum(passing)[ends], np.cumsum(~passing)[ends]
    kept, fake = kept / kept[-1], fake / fake[-1]
    some = np.linspace(0, 1, _POINTS // 2), np.geomspace(fake[fake > 0][0], 1, _POINTS // 2)
    places = np.unique([*np.searchsorted(kept, some[0]), *np.searchsorted(fake, some[1])])
    places = places[places < len(kept)]
    return Roc(tuple(kept[places].tolist()), tuple(fake[places].tolist()))


def residual(labels: Values, values: Values, relative: bool) -> Residual:
    """A histogram of the residuals from their 0.5 % to their 99.5 % quantile; others are
    counted."""
    gap = values.astype(np.float64) - labels
    if relative:
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = gap / labels
    return Residual(Histogram.over(gap, tail=0.005).plus(gap), relative)


def resolution(labels: Values, values: Values, relative: bool = False) -> float:
    """Half the width of the central 68.27 % of value - label; `relative`: of (value - label) /
    label.
    """
    gap = values.astype(np.float64) - labels
    low, high = np.quantile(gap / labels if relative else gap, (0.15865, 0.84135))
    return float(high - low) / 2
