"""Reference inputs from files, and the pieces of them that a version can run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile
from zlib import error as Damaged

import numpy as np
import numpy.typing as npt
import torch

from soa.files import check_zip
from soa.signature import Signature
from stages.errors import ReferenceDataError
from stages.reference.answers import (
    Arrays,
    Reference,
    check_inputs,
    read_tensors,
    run_eager,
    take_rows,
)
from stages.reference.nonfinite import Case

_WINDOWS = 64  # the most windows of further rows
Given = dict[str, dict[str, Any]]
"""Arrays as a file has them, by collection and column."""


def read_set(signature: Signature, path: Path) -> Arrays:
    """Read a larger set of inputs, all rows of a file, and check them against the layouts.

    The file has a tensor `input/<collection>/<column>` for each input column: `(N,)`, Eigen
    `(N, r)` or `(N, r, c)`, scalars `()`; N is the same for all columns of a row dimension. A
    stored reference has this form too; its outputs are not read. Raises ReferenceDataError.
    """
    arrays: Given = {}
    _, tensors = read_tensors(path, "a reference set", "input/")
    for (_, collection, column), value in tensors.items():
        arrays.setdefault(collection, {})[column] = value
    rows = _row_counts(signature, arrays, path)
    for dim in signature.dims:
        least = max(signature.ranges[dim].min, 1)
        if rows.get(dim, 0) < least:
            raise ReferenceDataError(
                f"{path}: {rows.get(dim, 0)} rows of {dim}, at least {least} are needed"
            )
    return _check(signature, arrays, path, rows)


def read_rows(signature: Signature, path: Path) -> Arrays:
    """Read reference inputs from an `.npz` file, as many rows as validation runs. If the file has
    fewer, they are repeated.

    The file has an array `<collection>/<column>` for each input column, in the shapes that
    `check_inputs` takes. Raises ReferenceDataError if it does not fit.
    """
    arrays = _read_npz(path)
    index = {
        dim: np.arange(signature.ranges[dim].proven) % n
        for dim, n in _row_counts(signature, arrays, path).items()
    }
    return _check(signature, _pick_rows(signature, arrays, index), path)


def read_more_rows(signature: Signature, path: Path) -> Arrays | None:
    """Read the rows of an `.npz` file after those that `read_rows` returns, to be cut by `windows`.

    If there are very many, only windows at even distances in the file are taken. None if the file
    has no more rows, or if rows belong together: jagged rows, and rows of several dimensions.
    """
    if len(signature.dims) != 1 or signature.jagged:
        return None
    (dim,) = signature.dims
    rows = signature.ranges[dim]
    arrays = _read_npz(path)
    n = _row_counts(signature, arrays, path).get(dim, 0)
    if n <= rows.proven:
        return None
    index = np.arange(min(rows.proven, n - rows.min), n)  # as many as a window needs, or more
    if len(index) > _WINDOWS * rows.max:
        starts = np.linspace(index[0], n - rows.max, _WINDOWS).astype(int)
        index = (starts[:, None] + np.arange(rows.max)).reshape(-1)
    return _check(signature, _pick_rows(signature, arrays, {dim: index}), path, {dim: len(index)})


def _read_npz(path: Path) -> Given:
    """Read the arrays that numpy.savez wrote, by collection and column. Raises ReferenceDataError
    for any other file."""
    arrays: Given = {}
    try:
        check_zip(path)
        with np.load(path, allow_pickle=False) as stored:
            for key in stored.files:
                collection, _, column = key.partition("/")
                arrays.setdefault(collection, {})[column] = stored[key]
    except (OSError, ValueError, EOFError, AttributeError, TypeError, BadZipFile, Damaged) as error:
        raise ReferenceDataError(f"{path} is no file of numpy.savez: {error}") from error
    return arrays


def _pick_rows(
    signature: Signature, arrays: Given, index: Mapping[str, npt.NDArray[np.int64]]
) -> Given:
    """Take the rows of all columns whose indices `index` has, by dimension. Arrays that are no
    column with rows are taken as they are."""
    picked = {name: dict(columns) for name, columns in arrays.items()}
    for name, column in _columns_with_rows(signature, arrays):
        picked[name][column] = arrays[name][column][index[signature.rows_of[name]]]
    return picked


def _columns_with_rows(signature: Signature, arrays: Given) -> list[tuple[str, str]]:
    """The pairs (collection, column) of the input columns with rows that are in `arrays`."""
    return [
        (name, column.name)
        for name in signature.input_collections
        for column in signature.layouts[name].numbers
        if column.kind != "scalar" and column.name in arrays.get(name, {})
    ]


def _row_counts(signature: Signature, arrays: Given, path: Path) -> Case:
    """The number of rows of each dimension. Raises ReferenceDataError if a column has none, or the
    columns of a dimension have different numbers."""
    rows: Case = {}
    for name, column in _columns_with_rows(signature, arrays):
        dim, values = signature.rows_of[name], arrays[name][column]
        n = len(values) if values.ndim else 0
        if n == 0 or rows.setdefault(dim, n) != n:
            others = f", and others {rows[dim]}" if dim in rows else ""
            raise ReferenceDataError(
                f"{path}: columns need the same number of rows: {column} has {n}{others}"
            )
    return rows


def _check(signature: Signature, arrays: Given, path: Path, rows: Case | None = None) -> Arrays:
    """Check inputs by `check_inputs`, and name the file `path` in its ReferenceDataError."""
    try:
        return check_inputs(signature, arrays, rows)
    except ReferenceDataError as error:
        raise ReferenceDataError(f"{path}: {error}") from error


def windows(signature: Signature, arrays: Arrays) -> Iterator[tuple[Arrays, Case]]:
    """Cut the inputs into pieces that the version can run, which together have all rows. Yields the
    rows of each piece, as views, and its case.

    The last piece may have rows of the one before, if it would be too small. With several row
    dimensions all rows are one piece; raises ReferenceDataError if it is too large.
    """
    total = {
        signature.rows_of[name]: len(arrays[name][column])
        for name, column in _columns_with_rows(signature, arrays)
    }
    if len(total) > 1:
        for dim, n in total.items():
            if n > signature.ranges[dim].max:
                raise ReferenceDataError(
                    f"{n} rows of {dim}, the version takes up to {signature.ranges[dim].max}; with "
                    "several row dimensions a reference set is one event"
                )
        yield arrays, total
        return
    ((dim, n),) = total.items()
    allowed = signature.ranges[dim]
    for start in range(0, n, allowed.max):
        size = max(min(allowed.max, n - start), allowed.min)
        begin = min(start, n - size)  # the last piece may overlap the one before
        yield take_rows(signature, arrays, {dim: slice(begin, begin + size)}), {dim: size}


def answer_windows(model: torch.nn.Module, signature: Signature, arrays: Arrays) -> Reference:
    """Run the eager model on each of the `windows` of the inputs, and return its answers as a
    reference with a case for each. Raises CaptureError if the model fails."""
    pieces = list(windows(signature, arrays))
    outputs = tuple(run_eager(model, signature, rows, case) for rows, case in pieces)
    return Reference(arrays, tuple(case for _, case in pieces), outputs)
