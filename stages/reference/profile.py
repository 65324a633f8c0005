"""The distribution of a reference's columns, with which `pipeline drift` compares other rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runtime.watch import Component, Profile, profiled
from soa.dtypes import torch_dtype
from soa.signature import Signature
from stages.reference.answers import Arrays, Reference


def profile_of_rows(signature: Signature, reference: Path, more: Path | None) -> Profile:
    """How the columns of the reference's rows, and of the user's further rows, are distributed;
    also the eager model's answers to them. `more`: the file of further rows."""
    pieces: list[dict[str, torch.Tensor]] = []
    stored = Reference.load(reference)
    largest = max(range(len(stored.cases)), key=lambda k: sum(stored.cases[k].values()))
    rows = _before_they_repeat(signature, stored.inputs)
    pieces += [
        _of_inputs(signature, stored.inputs, rows),
        _of_outputs(signature, stored.outputs[largest], rows),
    ]
    if more is not None:
        further = Reference.load(more)
        pieces.append(_of_inputs(signature, further.inputs))
        pieces += [_of_outputs(signature, each) for each in further.outputs]
    return profiled([{key: _in_numpy(values) for key, values in piece.items()} for piece in pieces])


def _before_they_repeat(signature: Signature, inputs: Arrays) -> dict[str, int]:
    """By dimension: how many rows there are before the same rows come again. A reference repeats
    the rows of a short file (see `read_rows`), and those are not independent of the first ones."""
    counts: dict[str, int] = {}
    for dim in signature.dims:
        columns = [
            np.ascontiguousarray(_in_numpy(inputs[name][column.name]))
            for name in signature.input_collections
            for column in signature.layouts[name].numbers
            if signature.rows_of[name] == dim and column.kind != "scalar"
        ]
        if columns:
            bytes_of = [each.reshape(len(each), -1).view(np.uint8) for each in columns]
            counts[dim] = _period(np.concatenate(bytes_of, axis=1))
    return counts


def _period(rows: npt.NDArray[np.uint8]) -> int:
    """The number of rows, `(n, bytes)`, after which they repeat to the end; n if they do not."""
    as_the_first = np.flatnonzero((rows[1:] == rows[:1]).all(1)) + 1
    return next((int(k) for k in as_the_first if (rows[k:] == rows[:-k]).all()), len(rows))


def _of_inputs(
    signature: Signature, inputs: Arrays, rows: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """By key: the values of each component that the model reads; of the first `rows`, by
    dimension, if given."""
    columns = {}
    for bound in signature.inputs:
        collection = bound.block.collection
        for name in bound.block.columns:
            column = signature.layouts[collection][name]
            values = inputs[collection][name].reshape(-1, column.components)
            for i in range(column.components):
                key = Component(collection, column, column.component_of(i)).key
                columns[key] = values[: rows.get(bound.rows) if rows else None, i]
    return columns


def _of_outputs(
    signature: Signature,
    outputs: Mapping[str, torch.Tensor],
    rows: Mapping[str, int] | None = None,
) -> dict[str, torch.Tensor]:
    """By key: the answers for each component that the model writes, in the column's dtype; `rows`
    as in `_of_inputs`."""
    columns = {}
    for bound in signature.outputs:
        values = outputs[bound.name].reshape(-1, len(bound.plan.order))
        for feature, place in enumerate(bound.plan.order):
            name, number = bound.plan.components[place]
            column = signature.layouts[bound.block.collection][name]
            key = Component(bound.block.collection, column, number).key
            own = values[: rows.get(bound.rows) if rows else None, feature]
            columns[key] = own.to(torch_dtype(column.dtype))
    return columns


def _in_numpy(values: torch.Tensor) -> Any:
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()
