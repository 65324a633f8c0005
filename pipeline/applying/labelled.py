"""Measures metrics of a version on labelled rows, for `gates: metrics:` of its config.

The labelled rows are a file with the columns that the model reads, and columns of labels. A bundle
holds a copy of that file and of the user's own functions, so that a gate can be checked again years
later.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pipeline.applying.columns import column_of
from pipeline.applying.job import Plan, blocks_by_column
from pipeline.applying.prepare import match_columns
from pipeline.applying.score_piece import Scorer
from pipeline.applying.sources import Source, open_source
from pipeline.config import MetricsConfig
from pipeline.errors import DataError
from registry.bundle import LabelledData
from runtime.session import Session
from soa.errors import SoaPipelineError
from soa.files import digest_of
from soa.signature import Signature
from stages.errors import MetricError
from stages.metrics import Metric
from stages.reports import Curve

_BATCH = 1 << 16  # rows


@dataclass(frozen=True)
class Measurement:
    """The value of a metric, and its curve if it has one. If the metric cannot be computed, `value`
    is NaN, and `why` is the reason."""

    value: float
    why: str = ""
    curve: Curve | None = None


@dataclass(frozen=True)
class Labelled:
    """A file of labelled rows, and the metrics to measure on it.

    `asked`: the metrics, as the config states them. `code`: by name of each metric that the user
    wrote, the function on this host, as `file.py:name`.
    """

    path: Path
    asked: MetricsConfig
    code: Mapping[str, str]

    def metrics(self) -> list[Metric]:
        """Return the metrics to measure, with their functions on this host."""
        metrics = []
        for name, config in self.asked.functions.items():
            function, kwargs = self.code.get(name, config.function), dict(config.kwargs)
            if function == "efficiency":
                working_point = {"background": config.background, "threshold": config.threshold}
                known = {key: value for key, value in working_point.items() if value is not None}
                kwargs = known | kwargs
            label = self.asked.label_of(name)
            metrics.append(
                Metric(
                    name, function, config.output, label, config.signal, config.threshold, kwargs
                )
            )
        return metrics

    def check(self, signature: Signature, columns: Mapping[str, str]) -> None:
        """Check what can be checked without an artifact: that the file has the columns that the
        model reads, and that the labels fit the metrics.

        `columns`: by column of the model, the column of the file, as in `apply: columns:`. Raises
        MetricError, DataError or ApplyError if something does not fit.
        """
        with self._open() as source:
            match_columns(signature, source, columns)
            for metric in self.metrics():
                metric.check(_read_column(source, metric.label))

    def measure(
        self, session: Session, columns: Mapping[str, str], missing: bool = False
    ) -> dict[str, Measurement]:
        """Run a session on all rows, and compute each metric on its outputs. Returns the
        measurements by metric. `columns` and errors are as for `check`; `missing` is as in `Plan`.
        """
        with self._open() as source:
            outputs = _compute_outputs(session, source, columns, missing)
            return {metric.name: _measure(metric, source, outputs) for metric in self.metrics()}

    def copy_files(self, folder: Path) -> LabelledData:
        """Copy the file and the user's functions into the new `folder`, which becomes a part of a
        bundle. Returns the record for the manifest. Its paths begin with the folder's name."""
        with self._open() as source:
            rows = source.edges([metric.label for metric in self.metrics()])[-1]
        folder.mkdir()
        data = f"data{self.path.suffix}"
        shutil.copyfile(self.path, folder / data)
        files = {name: spec.rpartition(":")[0] for name, spec in self.code.items()}
        code = {name: f"{name}.py" for name, file in files.items() if file.endswith(".py")}
        for name, copy in code.items():
            shutil.copyfile(files[name], folder / copy)
        return LabelledData(
            file=f"{folder.name}/{data}",
            source=self.path.name,
            sha256=digest_of(folder / data),
            rows=rows,
            code={name: f"{folder.name}/{copy}" for name, copy in code.items()},
        )

    @classmethod
    def from_bundle(cls, stored: LabelledData, asked: MetricsConfig, folder: Path) -> Labelled:
        """Return the labelled rows in a bundle, which `copy_files` copied. `stored`: the record of
        them in the manifest. `folder`: the folder that its paths are relative to."""
        code = {}
        for name, file in stored.code.items():
            function = asked.functions[name].function.rpartition(":")[2]
            code[name] = f"{folder / file}:{function}"
        return cls(folder / stored.file, asked, code)

    @contextmanager
    def _open(self) -> Iterator[Source]:
        """Open the file, and close it at the end. DataError if it lacks a column of labels,
        MetricError if it has no rows."""
        with open_source(self.path, self.asked.tree) as source:
            labels = [metric.label for metric in self.metrics()]
            source.require(labels)
            if source.edges(labels)[-1] == 0:
                raise MetricError(f"{self.path} has no rows: metrics need some")
            yield source


def _measure(
    metric: Metric, source: Source, outputs: Mapping[str, npt.NDArray[Any]]
) -> Measurement:
    """Compute a metric and its curve. `outputs`: as `_compute_outputs` returns them. If the metric
    cannot be computed, the value is NaN, and the reason is in the result."""
    try:
        if metric.output not in outputs:
            raise MetricError(f"metric {metric.name!r}: no output {metric.output!r}")
        labels, output = _read_column(source, metric.label), outputs[metric.output]
        value = metric.value(labels, output, lambda name: _read_column(source, name))
        return Measurement(value, curve=metric.curve(labels, output))
    except SoaPipelineError as error:
        return Measurement(math.nan, str(error))


def _read_column(source: Source, name: str) -> npt.NDArray[Any]:
    """Read all rows of a column; of a jagged column, all items. DataError if it is missing, or does
    not hold numbers."""
    source.require([name])
    batches = source.batches([name], 0, source.edges([name])[-1], _BATCH)
    with _name_in_errors(source, name):
        values = [column_of(name, batch[name]).values for batch in batches]
    return np.concatenate(values)


@contextmanager
def _name_in_errors(source: Source, name: str) -> Iterator[None]:
    """Turn a ValueError about the values of a column, raised in the `with` block, into a DataError
    that names the file and the column."""
    try:
        yield
    except ValueError as error:
        raise DataError(f"{source.path}: {name} {error}") from error


def _compute_outputs(
    session: Session, source: Source, columns: Mapping[str, str], missing: bool
) -> dict[str, npt.NDArray[Any]]:
    """Run the session on all rows of the file. Returns each output column, and each output block
    with its columns side by side, by the names that `_name_outputs` gives them."""
    signature = session.signature
    keys = {key: key.partition("/")[2] for key in blocks_by_column(signature.outputs)}
    read = match_columns(signature, source, columns)
    # The plan needs no `Reopening`, since the scorer gets the session itself.
    plan = Plan(cast(Any, None), read, keys, keep=(), batch=_BATCH, missing=missing)
    scorer = Scorer(session, plan)
    source.cast(scorer.dtypes)
    names = list(dict.fromkeys(read.values()))
    values_of: dict[str, list[npt.NDArray[Any]]] = {key: [] for key in keys}
    for batch in source.batches(names, 0, source.edges(names)[-1], _BATCH):
        with _name_in_errors(source, ", ".join(names)):
            answers = scorer.compute_answers(batch)
        for key, values in answers.columns.items():
            values_of[key].append(values.reshape(len(values), -1))
    columns_of = {key: np.concatenate(batches) for key, batches in values_of.items()}
    return _name_outputs(signature, columns_of)


def _name_outputs(
    signature: Signature, columns: Mapping[str, npt.NDArray[Any]]
) -> dict[str, npt.NDArray[Any]]:
    """Name the outputs, and join the columns of each block.

    `columns`: arrays `(rows, components)` by `collection/column`. The result has the same arrays by
    column, or by `collection/column` if two collections have a column of that name, and arrays by
    block. An array of one component has the shape `(rows,)`.
    """
    names = [key.partition("/")[2] for key in columns]
    outputs = {
        key if names.count(name) > 1 else name: columns[key]
        for key, name in zip(columns, names, strict=True)
    }
    for bound in signature.outputs:
        members = [columns[f"{bound.block.collection}/{name}"] for name in bound.block.columns]
        outputs[bound.name] = np.concatenate(members, axis=1)
    return {
        name: values[:, 0] if values.shape[1] == 1 else values for name, values in outputs.items()
    }
