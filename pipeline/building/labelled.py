"""The labelled rows of `gates: metrics:`, from the user's file into the bundle.

They are kept as they are used, beside the user's own functions: a gate can be asked again years
later, where the file is no more.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from pipeline.config import Config, metrics_of
from pipeline.files import FileColumn, Source, column_of, open_source, reading
from registry.bundle import LabelledData
from soa.dtypes import is_float, torch_dtype
from soa.files import digest_of
from soa.signature import Signature, offsets_of
from stages.errors import MetricError
from stages.metrics import check_metrics
from stages.reference import Arrays, Reference, check_inputs

_BATCH = 1 << 20
_FOLDER = "metrics"


def read_labelled(config: Config, signature: Signature) -> Reference | None:
    """The file's rows and labels, checked; None where the config asks for no metric.

    A column of the model is `collection/column` in the file, else `column`. Raises DataError,
    MetricError, ReferenceDataError.
    """
    asked, path = config.gates.metrics, config.files.metric_data
    if asked is None or path is None:
        return None
    metrics = metrics_of(asked, config.files.metric_code)
    spans = {offsets_of(name): name for name in signature.jagged}
    given: Arrays = {}
    with open_source(path, asked.tree) as source:
        labels = dict.fromkeys(metric.label for metric in metrics)
        places = {
            (name, member.name): full if (full := f"{name}/{member.name}") in source.columns
            else member.name
            for name in signature.input_collections if name not in spans
            for member in signature.layouts[name].numbers
            if not _written(signature, name, member.name)
        }  # fmt: skip
        count = source.rows([*places.values(), *labels])
        if count == 0:
            raise MetricError(f"{path} has no rows: metrics need some")
        found = {name: _column(source, name, count) for name in {*places.values(), *labels}}
    for (name, member), place in places.items():
        column, dtype = found[place], signature.layouts[name][member].dtype
        if (name in signature.jagged) != (column.offsets is not None):
            kind = "flat" if column.offsets is None else "jagged"
            raise MetricError(f"{path}: {place} is {kind}, and the collection {name!r} is not")
        if column.values.dtype.kind == "f" and not is_float(dtype):
            raise MetricError(f"{path}: {place} is {column.values.dtype}, the config says {dtype}")
        given.setdefault(name, {})[member] = torch.from_numpy(column.values).to(torch_dtype(dtype))
        if column.offsets is not None:
            ends = torch.from_numpy(column.offsets).to(
                torch_dtype(signature.layouts[offsets_of(name)]["end"].dtype)
            )
            spanned = given.setdefault(offsets_of(name), {"begin": ends[:-1], "end": ends[1:]})
            if not torch.equal(spanned["end"], ends[1:]):
                raise MetricError(f"{path}: {place} has other items in a row than those before it")
    rows = {signature.rows_of[name]: len(next(iter(own.values()))) for name, own in given.items()}
    every = {name: torch.from_numpy(found[name].values) for name in labels}
    data = Reference(check_inputs(signature, given, rows), (rows,), (every,))
    check_metrics(metrics, data)
    return data


def _written(signature: Signature, collection: str, column: str) -> bool:
    """Whether the model writes this column of an input collection."""
    blocks = [bound.block for bound in signature.outputs]
    return any(b.collection == collection and column in b.columns for b in blocks)


def _column(source: Source, name: str, count: int) -> FileColumn:
    """All rows of a column."""
    with reading(source.path, name):
        batches = source.batches([name], 0, count, _BATCH)
        parts = [column_of(name, batch[name]) for batch in batches]
        sizes = [np.diff(part.offsets) for part in parts if part.offsets is not None]
        offsets = np.append(0, np.cumsum(np.concatenate(sizes))) if sizes else None
        return FileColumn(name, np.concatenate([part.values for part in parts]), offsets)


def store_labelled(config: Config, data: Reference, folder: Path) -> LabelledData:
    """Write the rows and the user's functions into `folder`, which becomes a part of a bundle."""
    path = config.files.metric_data
    assert path is not None  # there is data
    folder.mkdir()
    data.save(folder / "data.safetensors")
    code = {}
    for name, spec in config.files.metric_code.items():
        file = spec.rpartition(":")[0]
        if file.endswith(".py"):
            shutil.copyfile(file, folder / f"{name}.py")
            code[name] = f"{_FOLDER}/{name}.py"
    return LabelledData(
        file=f"{_FOLDER}/data.safetensors",
        source=path.name,
        sha256=digest_of(path),
        rows=len(next(iter(data.outputs[0].values()))),
        code=code,
    )
