"""Metrics: numbers in the users' own terms, from an artifact's own outputs on labelled rows.

Labelled rows are a reference with one case, whose outputs are the labels by name, `(rows,)` each.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engines.errors import first_line
from runtime.session import Session
from soa.errors import needs_extra
from soa.memory import read_block
from stages.errors import MetricError
from stages.model import load_callable
from stages.reference import Reference, check_inputs, filled_collections, windows

Values = npt.NDArray[Any]


@dataclass(frozen=True)
class Metric:
    """`function(labels, output, **kwargs)`: a scikit-learn name, `efficiency`, `resolution`; or as
    `file.py:name`, `module:name` a callable, which gets the inputs by `collection/column` too.

    Labels are `(rows,)`; with `signal` 1 where they are that, else 0. `output` is an output column,
    `(rows,)`, or a block, `(rows, …)`. A function of classes gets whether the output is above
    `threshold`, or of several columns the number of the largest.
    """

    name: str
    function: str
    output: str
    label: str
    signal: int | None = None
    threshold: float | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def check_metrics(metrics: Sequence[Metric], data: Reference) -> None:
    """Refuse, before anything is built, what no artifact would change. Raises MetricError."""
    for metric in metrics:
        _, takes = _function(metric)
        label = _labels(metric, data)
        if takes == "score" and len(np.unique(label)) < 2:
            raise MetricError(
                f"metric {metric.name!r}: every label {metric.label!r} is {label[0]}, and "
                f"{metric.function} needs two classes"
            )


def metric_value(metric: Metric, data: Reference, outputs: Mapping[str, Values]) -> float:
    """The metric on what `outputs_on` gave. Raises MetricError where it is no finite number."""
    where, label = f"metric {metric.name!r}", _labels(metric, data)
    found = outputs.get(metric.output)
    if found is None or len(found) != len(label):
        have = "no such output" if found is None else f"{len(found)} rows"
        raise MetricError(f"{where}: {len(label)} labels, and of {metric.output!r} {have}")
    function, takes = _function(metric)
    more: list[Any] = []
    if takes == "all":
        more = [{f"{c}/{k}": _numpy(v) for c, own in data.inputs.items() for k, v in own.items()}]
    elif takes == "class" and found.ndim > 1:
        found = found.argmax(-1)
    elif takes == "class" and metric.threshold is not None:
        found = found > metric.threshold
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = function(label, found, *more, **metric.kwargs)
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise MetricError(f"{where}: {metric.function} failed: {said}") from error
    try:
        number = float(value)
    except (TypeError, ValueError):
        kind = type(value).__name__
        raise MetricError(f"{where}: {metric.function} gave a {kind}, not a number") from None
    if not math.isfinite(number):
        raise MetricError(f"{where}: {metric.function} gave {number} on {len(label)} rows")
    return number


def _function(metric: Metric) -> tuple[Callable[..., Any], str]:
    """The function, and what of an output it takes: "score", "value", "class", or "all"."""
    name = metric.function
    if ":" in name:
        return load_callable(name), "all"
    if name == "efficiency":
        return efficiency, "score"
    if name == "resolution":
        return resolution, "value"
    with needs_extra("metrics", MetricError):
        from sklearn import metrics
    function = getattr(metrics, f"{name}_score", None) or getattr(metrics, name, None)
    takes = list(inspect.signature(function).parameters) if callable(function) else []
    if function is None or takes[:1] != ["y_true"]:
        raise MetricError(
            f"metric {metric.name!r}: {name!r} is neither efficiency, resolution nor a function of "
            "labels and outputs in sklearn.metrics; for one of your own write file.py:callable"
        )
    return function, "class" if takes[1] == "y_pred" and name != "log_loss" else "score"


def _labels(metric: Metric, data: Reference) -> Values:
    values = data.outputs[0].get(metric.label)
    if values is None:
        raise MetricError(f"metric {metric.name!r}: the data has no label {metric.label!r}")
    found = _numpy(values)
    return found if metric.signal is None else (found == metric.signal).astype(np.int64)


def _numpy(values: torch.Tensor) -> Values:
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def efficiency(
    labels: Values, scores: Values, background: float | None = None, threshold: float = math.nan
) -> float:
    """The fraction of signal (label 1) with a score above `threshold`: a given one, or the lowest
    at which at most the fraction `background` of all else is above it."""
    signal = labels == 1
    if background is not None:
        threshold = float(np.quantile(scores[~signal], 1 - background, method="higher"))
    return float(np.mean(scores[signal] > threshold))


def resolution(labels: Values, values: Values, relative: bool = False) -> float:
    """Half the width of the central 68.27 % of value - label; `relative`: of that over label."""
    gap = values.astype(np.float64) - labels
    low, high = np.quantile(gap / labels if relative else gap, (0.15865, 0.84135))
    return float(high - low) / 2


def outputs_on(session: Session, data: Reference) -> dict[str, Values]:
    """A session's outputs on all rows, by block and by column (`collection/column` where several
    blocks have a column of the name): `(rows,)`, or `(rows, …)` of several components.

    Raises MetricError, ReferenceDataError for rows of another signature.
    """
    signature, (rows,) = session.signature, data.cases
    if rows.keys() != {*signature.dims}:
        raise MetricError(f"the labelled rows are of {', '.join(rows)}, and the version has others")
    inputs = check_inputs(signature, data.inputs, rows)
    bounds = [bound for bound in signature.outputs if not bound.rowless]
    parts: dict[str, list[torch.Tensor]] = {bound.name: [] for bound in bounds}
    for arrays, case in windows(signature, inputs):
        given, written = filled_collections(signature, arrays, case, session.device)
        session.run(given, written)
        for bound in bounds:
            found, mine = read_block(bound, written[bound.block.collection]), parts[bound.name]
            # The last window may begin with rows of the one before.
            mine.append(found[max(0, sum(map(len, mine)) + len(found) - rows[bound.rows]) :])
    every = [name for bound in signature.outputs for name in bound.block.columns]
    outputs: dict[str, torch.Tensor] = {}
    for bound in bounds:
        where, block = bound.block.collection, torch.cat(parts[bound.name])
        widths = [signature.layouts[where][name].components for name in bound.block.columns]
        columns = block.flatten(1).split(widths, 1)
        outputs[bound.name] = block
        for name, column in zip(bound.block.columns, columns, strict=True):
            outputs[name if every.count(name) == 1 else f"{where}/{name}"] = column
    return {n: _numpy(v.squeeze(1) if v.shape[1:] == (1,) else v) for n, v in outputs.items()}
