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
    """The form in which a metric's function takes the model's outputs: as scores, as values of a
    regression, or as classes. OWN is a function of the user's, which takes any outputs."""

    SCORE = auto()
    VALUE = auto()
    CLASS = auto()
    OWN = auto()


@dataclass(frozen=True)
class Metric:
    """A number that is computed from the labels in a column and from an output of the model.

    `function` names what computes it: a metric of scikit-learn, `efficiency`, `resolution`, or a
    callable of the user's as `file.py:name` or `module:name`. It is called as `function(labels,
    output, **kwargs)`; a callable of the user's gets a third argument, `column(name)`, which
    returns another column.

    Labels are `(rows,)`. With `signal`, a label equal to it becomes 1, any other 0. The output is a
    column, `(rows,)`, or a block, `(rows, columns)`. A function of classes gets the bools
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
        """Refuse labels with which every model would get the same value or none.

        Raises MetricError for labels that are NaN, and for labels of one class only if the metric
        needs two; SourceError if the user's own function cannot be loaded.
        """
        _, form = self._find_function()
        if form is not Form.OWN and (missing := int(np.sum(np.isnan(labels)))):
            raise MetricError(
                f"metric {self.name!r}: the label {self.label!r} is NaN in {missing} of "
                f"{len(labels)} rows: leave these out of the file"
            )
        if form is Form.SCORE and len(np.unique(self._with_signal(labels))) < 2:
            why = f"every label {self.label!r} is {labels[0]}"
            if self.signal is not None:
                why = f"of the labels {self.label!r} all or none are {self.signal}"
            raise MetricError(f"metric {self.name!r}: {self.function} needs two classes, and {why}")

    def value(self, labels: Values, output: Values, column: Callable[[str], Values]) -> float:
        """Compute the metric of a model's `output`.

        `column(name)` returns another column, (rows,); it is passed to functions of the user's
        only. Raises MetricError if the function fails or returns no finite number.
        """
        where = f"metric {self.name!r}: {self.function}"
        function, form = self._find_function()
        if len(output) != len(labels):
            raise MetricError(f"{where}: {len(labels)} labels, {len(output)} rows of outputs")
        if form is Form.CLASS and output.ndim > 1:
            output = output.argmax(1)
        elif form is Form.CLASS and self.threshold is not None:
            output = output > self.threshold
        arguments: list[Any] = [_read_only_copy(self._with_signal(labels)), _read_only_copy(output)]
        if form is Form.OWN:
            arguments.append(lambda name: _read_only_copy(column(name)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                returned = function(*arguments, **deepcopy(dict(self.kwargs)))
        except Exception as error:
            message = f"{type(error).__name__}: {first_line(error)}"
            if "read-only" in message:
                message += "; it may not write into what it is given: let it take a copy"
            raise MetricError(f"{where} failed: {message}") from error
        try:
            number = float(returned)
        except (TypeError, ValueError):
            kind = type(returned).__name__
            raise MetricError(f"{where} gave a {kind}, not a number") from None
        if not math.isfinite(number):
            raise MetricError(f"{where} gave {number} on {len(labels)} rows")
        return number

    def curve(self, labels: Values, output: Values) -> Curve:
        """The curve to draw for this metric: the ROC of scores, or the residuals of a regression.
        For any other form of output, returns a NotDrawn with the reason."""
        _, form = self._find_function()
        if form is Form.OWN:
            return NotDrawn("it is a function of your own, and only scores and residuals are drawn")
        if output.ndim > 1:
            return NotDrawn(f"{self.output} has several columns")
        expected = self._with_signal(labels)
        if form is Form.CLASS and self.threshold is not None:
            form = Form.SCORE
        if form is Form.SCORE:
            positive = 1 if self.function == "efficiency" else expected.max()  # as in scikit-learn
            return roc(expected == positive, output)
        if form is Form.VALUE or (form is Form.CLASS and output.dtype.kind == "f"):
            return residual(expected, output, bool(self.kwargs.get("relative", False)))
        return NotDrawn(f"{self.output} is a class, and only scores and residuals are drawn")

    def _with_signal(self, labels: Values) -> Values:
        """The labels. If the metric has a `signal`: 1 where the label is equal to it, else 0."""
        return labels if self.signal is None else (labels == self.signal).astype(np.int64)

    def _find_function(self) -> tuple[Callable[..., Any], Form]:
        """Look up the metric's function, and the form in which it takes outputs.

        Raises MetricError for an unknown name, SourceError if a callable cannot be loaded.
        """
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


def _read_only_copy(values: Values) -> Values:
    """A read-only copy of the values, so that no metric's function can change them for the next."""
    copy = values.copy()
    copy.flags.writeable = False
    return copy


def efficiency(
    labels: Values, scores: Values, background: float | None = None, threshold: float = math.nan
) -> float:
    """The fraction of signal rows (label 1) whose score is above `threshold`.

    If `background` is given, `threshold` is not used: the lowest threshold is taken above which at
    most the fraction `background` of all other rows lies.
    """
    signal = labels == 1
    if background is not None:
        ascending = np.sort(scores[~signal])
        passing = int(background * len(ascending) + 1e-9)  # 0.29 * 100 is a little less than 29
        threshold = float(ascending[max(len(ascending) - 1 - passing, 0)])
    return float(np.mean(scores[signal] > threshold))


def roc(signal: Values, scores: Values) -> Roc | NotDrawn:
    """The ROC curve of scores, `(rows,)`, at no more than `_POINTS` points.

    `signal` tells for each row whether it is signal; all others are background. Half of the points
    are evenly spaced in the signal's efficiency, the others in the logarithm of the background's,
    so that they suffice for a linear and for a logarithmic axis. Returns a NotDrawn if one of the
    two classes has no row.
    """
    order = np.argsort(-scores.astype(np.float64), kind="stable")
    ranked, is_signal = scores[order], signal[order]
    if is_signal.all() or not is_signal.any():
        absent = "background" if is_signal.all() else "signal"
        return NotDrawn(f"the labelled rows have no {absent}")
    ends = np.append(ranked[1:] != ranked[:-1], True)  # rows with equal scores pass together
    true_rate, false_rate = np.cumsum(is_signal)[ends], np.cumsum(~is_signal)[ends]
    true_rate, false_rate = true_rate / true_rate[-1], false_rate / false_rate[-1]
    linear = np.linspace(0, 1, _POINTS // 2)
    logarithmic = np.geomspace(false_rate[false_rate > 0][0], 1, _POINTS // 2)
    points = np.unique(
        [*np.searchsorted(true_rate, linear), *np.searchsorted(false_rate, logarithmic)]
    )
    points = points[points < len(true_rate)]
    return Roc(tuple(true_rate[points].tolist()), tuple(false_rate[points].tolist()))


def residual(labels: Values, values: Values, relative: bool) -> Residual:
    """A histogram of the residuals, value - label; if `relative`, divided by the label.

    Its bins go from the 0.5 % to the 99.5 % quantile. Residuals outside are only counted.
    """
    difference = values.astype(np.float64) - labels
    if relative:
        with np.errstate(divide="ignore", invalid="ignore"):
            difference = difference / labels
    return Residual(Histogram.over(difference, tail=0.005).plus(difference), relative)


def resolution(labels: Values, values: Values, relative: bool = False) -> float:
    """Half the width of the interval with the central 68.27 % of the residuals, value - label; if
    `relative`, of the residuals divided by the label. For a normal distribution it is sigma."""
    difference = values.astype(np.float64) - labels
    residuals = difference / labels if relative else difference
    low, high = np.quantile(residuals, (0.15865, 0.84135))
    return float(high - low) / 2
