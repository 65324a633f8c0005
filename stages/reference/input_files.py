"""Reference inputs from files, and the pieces of them that a version can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    compute_reference,
    read_tensors,
)
from stages.reference.nonfinite import Case

_WINDOWS = 64  # the most windows of further rows


def read_set(signature: Signature, path: Path) -> Arrays:
    """A larger set of inputs: all rows of the file, checked against the layouts.

    The file has a tensor `input/<collection>/<column>` for each input column: `(N,)`, Eigen
    `(N, r)` or `(N, r, c)`, scalars `()`; N is the same for all columns of a row dimension. A
    stored reference has this form too; its outputs are not read. Raises ReferenceDataError.
    """
    given: Arrays = {}
    _, tensors = read_tensors(path, "a reference set", "input/")
    for (_, collection, column), value in tensors.items():
        given.setdefault(collection, {})[column] = value
    rows: Case = {}
    for name in signature.input_collections:
        dim = signature.rows_of[name]
        for member in signature.layouts[name].numbers:
            found = given.get(name, {}).get(member.name)
            if found is not None and member.kind != "scalar" and found.ndim:
                rows[dim] = max(rows.get(dim, 0), found.shape[0])
    for dim in signature.dims:
        least = max(signature.ranges[dim].min, 1)
        if rows.get(dim, 0) < least:
            raise ReferenceDataError(
                f"{path}: {rows.get(dim, 0)} rows of {dim}, at least {least} are needed"
            )
    try:
        return check_inputs(signature, given, rows)
    except ReferenceDataError as error:
        raise ReferenceDataError(f"{path}: {error}") from error


def read_rows(signature: Signature, path: Path) -> Arrays:
    """Inputs from an `.npz` file: an array `<collection>/<column>` for each input column, of the
    shapes that `check_inputs` takes.

    Returns as many rows as validation runs: if the file has fewer, they are repeated. Raises
    ReferenceDataError.
    """
    return _taken(signature, path, lambda dim, n: np.arange(signature.ranges[dim].proven) % n, None)


def more_rows(signature: Signature, path: Path) -> Arrays | None:
    """The rows of such a file after those that `read_rows` returns, for `windows`.

    If there are very many rows, windows at even distances in the file are taken. None if there are
    no more rows, or if rows belong together: jagged rows, and rows of several dimensions.
    """
    if len(signature.dims) != 1 or signature.jagged:
        return None
    (dim,) = signature.dims
    rows = signature.ranges[dim]
    taken: Case = {dim: 0}

    def after(dim: str, n: int) -> npt.NDArray[Any]:
        found = np.arange(min(rows.proven, n - rows.min) if n > rows.proven else n, n)
        if len(found) > _WINDOWS * rows.max:
            starts = np.linspace(found[0], n - rows.max, _WINDOWS).astype(int)
            found = (starts[:, None] + np.arange(rows.max)).reshape(-1)
        taken[dim] = len(found)
        return found

    found = _taken(signature, path, after, taken)
    return found if taken[dim] else None


def _taken(
    signature: Signature,
    path: Path,
    which: Callable[[str, int], npt.NDArray[Any]],
    rows: Case | None,
) -> Arrays:
    """The rows of the file that `which` selects in each dimension, after `check_inputs`."""
    given: dict[str, dict[str, npt.NDArray[Any]]] = {}
    try:
        check_zip(path)
        with np.load(path, allow_pickle=False) as stored:
            for key in stored.files:
                collection, _, column = key.partition("/")
                given.setdefault(collection, {})[column] = stored[key]
    except (OSError, ValueError, EOFError, AttributeError, TypeError, BadZipFile, Damaged) as error:
        raise ReferenceDataError(f"{path} is no file of numpy.savez: {error}") from error
    for dim in signature.dims:
        columns = [
            (given[name], column.name)
            for name in signature.input_collections
            for column in signature.layouts[name].columns
            if signature.rows_of[name] == dim and column.kind != "scalar"
            and column.name in given.get(name, {})
        ]  # fmt: skip
        counts = {len(part[key]) if part[key].ndim else 0: key for part, key in columns}
        if len(counts) > 1 or 0 in counts:
            found = ", ".join(f"{key} has {n}" for n, key in sorted(counts.items()))
            raise ReferenceDataError(f"{path}: columns need the same number of rows: {found}")
        for n in counts:
            index = which(dim, n)
            for part, key in columns:
                part[key] = part[key][index]
    try:
        return check_inputs(signature, given, rows)
    except ReferenceDataError as error:
        raise ReferenceDataError(f"{path}: {error}") from error


def windows(signature: Signature, arrays: Arrays) -> Iterator[tuple[Arrays, Case]]:
    """Cut the inputs into pieces that the version can run; together they hold all rows.

    With several row dimensions all rows are one piece; ReferenceDataError if it is too large.
    """
    total = {
        signature.rows_of[name]: next(
            arrays[name][c.name].shape[0]
            for c in signature.layouts[name].numbers
            if c.kind != "scalar"
        )
        for name in signature.input_collections
        if any(c.kind != "scalar" for c in signature.layouts[name].numbers)
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
        first = min(start, n - size)  # the last piece may overlap the one before
        yield (
            {
                name: {
                    c.name: arrays[name][c.name]
                    if c.kind == "scalar"
                    else arrays[name][c.name][first : first + size]
                    for c in signature.layouts[name].numbers
                }
                for name in signature.input_collections
            },
            {dim: size},
        )


def answers_of_windows(model: torch.nn.Module, signature: Signature, arrays: Arrays) -> Reference:
    """The eager model's answers, with a case for each of the `windows`; CaptureError if it
    fails."""
    parts = list(windows(signature, arrays))
    answers = (compute_reference(model, signature, rows, (case,)) for rows, case in parts)
    outputs = tuple(each.outputs[0] for each in answers)
    return Reference(arrays, tuple(case for _, case in parts), outputs)
