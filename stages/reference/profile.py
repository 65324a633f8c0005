"""The distribution of a reference's columns, with which `pipeline drift` compares other rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runtime.watch import Component, Profile, make_profile
from soa.dtypes import torch_dtype
from soa.signature import Signature
from stages.reference.answers import Arrays, Reference


def profile_of_rows(signature: Signature, reference: Path, more: Path | None) -> Profile:
    """Make a profile of the reference's rows and of the user's further rows: how each input column,
    and each output column of the eager model, is distributed.

    `reference` is the file of the reference, `more` that of the further rows; None: there are none.
    """
    stored = Reference.load(reference)
    sizes = [sum(case.values()) for case in stored.cases]
    answers = stored.outputs[sizes.index(max(sizes))]
    rows = _rows_before_repetition(signature, stored.inputs)
    pieces = [_input_columns(signature, stored.inputs, rows)]
    pieces.append(_output_columns(signature, answers, rows))
    if more is not None:
        further = Reference.load(more)
        pieces.append(_input_columns(signature, further.inputs))
        pieces += [_output_columns(signature, outputs) for outputs in further.outputs]
    return make_profile(pieces)


def _rows_before_repetition(signature: Signature, inputs: Arrays) -> dict[str, int]:
    """For each dimension: how many rows there are before the same rows come again. A reference
    repeats the rows of a short file (see `read_rows`); the repeated ones must not count twice."""
    counts: dict[str, int] = {}
    for dim in signature.dims:
        columns = [
            np.ascontiguousarray(_as_numpy(inputs[name][column.name]))
            for name in signature.input_collections
            for column in signature.layouts[name].numbers
            if signature.rows_of[name] == dim and column.kind != "scalar"
        ]
        if columns:
            as_bytes = [values.reshape(len(values), -1).view(np.uint8) for values in columns]
            counts[dim] = _period(np.concatenate(as_bytes, axis=1))
    return counts


def _period(rows: npt.NDArray[np.uint8]) -> int:
    """The number of rows after which the same rows are repeated to the end; n if they are not.
    `rows` has the bytes of each row, `(n, bytes)`."""
    like_the_first = np.flatnonzero((rows[1:] == rows[:1]).all(1)) + 1
    for period in like_the_first.tolist():
        if (rows[period:] == rows[:-period]).all():
            return int(period)
    return len(rows)


def _input_columns(
    signature: Signature, inputs: Arrays, rows: Mapping[str, int] | None = None
) -> dict[str, npt.NDArray[Any]]:
    """The values of each component that the model reads, by its key in the profile. If `rows` is
    given, only so many first rows of each dimension are taken."""
    columns: dict[str, npt.NDArray[Any]] = {}
    for bound in signature.inputs:
        collection = bound.block.collection
        end = rows.get(bound.rows) if rows else None
        for name in bound.block.columns:
            column = signature.layouts[collection][name]
            values = inputs[collection][name].reshape(-1, column.components)
            for i in range(column.components):
                key = Component(collection, column, column.component_of(i)).key
                columns[key] = _as_numpy(values[:end, i])
    return columns


def _output_columns(
    signature: Signature,
    outputs: Mapping[str, torch.Tensor],
    rows: Mapping[str, int] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """The answers for each component that the model writes, in the dtype of its column, by its key
    in the profile. `rows` is as in `_input_columns`."""
    columns: dict[str, npt.NDArray[Any]] = {}
    for bound in signature.outputs:
        end = rows.get(bound.rows) if rows else None
        values = outputs[bound.name].reshape(-1, len(bound.plan.order))
        for feature, position in enumerate(bound.plan.order):
            name, number = bound.plan.components[position]
            column = signature.layouts[bound.block.collection][name]
            key = Component(bound.block.collection, column, number).key
            columns[key] = _as_numpy(values[:end, feature].to(torch_dtype(column.dtype)))
    return columns


def _as_numpy(values: torch.Tensor) -> Any:
    """The values as a NumPy array; bfloat16 becomes float32, since NumPy does not have it."""
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()
