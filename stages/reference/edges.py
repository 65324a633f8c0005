"""Rows with extreme values of a column: NaN, infinities, huge numbers, integers of any size.

The eager model gives the expected answers. Extreme floats do not occur in measurements, so other
answers of an artifact are only reported. Extreme integers do occur: other answers are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np
import torch

from engines.errors import first_line
from soa.dtypes import is_float, torch_dtype
from soa.layout import Column
from soa.signature import Signature, offsets_of
from stages.reference.answers import Arrays, Edge, compute_reference
from stages.reference.nonfinite import Case
from stages.reference.offsets import inputs_at

_ROWS = 37
# Powers of a dtype's largest number: squares of the second overflow, and sums of the third may.
_HUGE = (0.4, 0.55, 0.9, 1.0)

Change = Callable[[Column, int, torch.Tensor], torch.Tensor]
"""A function of a column, its index among the columns of its kind, and its values."""


def edge_rows(
    model: torch.nn.Module, signature: Signature, inputs: Arrays, stated: Collection[str] = ()
) -> tuple[tuple[Edge, ...], tuple[str, ...]]:
    """Rows with extreme values and the eager model's answers; a note where the model fails on them.

    The other values of such a row are from `inputs`. Integer columns named in `stated`, whose range
    the user gave, get no extreme values.
    """
    found: list[Edge] = []
    notes: list[str] = []
    ranges = {dim: signature.ranges[dim] for dim in signature.dims}
    case = {dim: min(max(_ROWS, rows.min), rows.proven) for dim, rows in ranges.items()}
    if not all(case.values()):
        return (), ()
    few = _first_rows(signature, inputs, case)
    for what, exact, members, change in _kinds(signature, stated):
        if not members:
            continue
        changed = {name: dict(columns) for name, columns in few.items()}
        for number, (name, column) in enumerate(members):
            changed[name][column.name] = change(column, number, few[name][column.name].clone())
        try:
            (answers,) = compute_reference(model, signature, changed, (case,)).outputs
        except Exception as error:  # the user's own code may raise any type
            notes.append(f"{what} in the inputs are not tried: {first_line(error)}")
        else:
            found.append(Edge(what, exact, changed, case, answers))
    return tuple(found), tuple(notes)


Member = tuple[str, Column]
Kind = tuple[str, bool, list[Member], Change]


def _kinds(signature: Signature, stated: Collection[str]) -> Iterator[Kind]:
    """Each kind of value: its name, whether engines have to agree, the columns, and the function
    that changes them."""
    offsets = {offsets_of(name) for name in signature.jagged}
    read = {(b.block.collection, c) for b in signature.inputs for c in b.block.columns}
    columns = [
        (name, column)
        for name in signature.input_collections
        for column in signature.layouts[name].numbers
        if (name, column.name) in read and column.kind != "scalar" and name not in offsets
    ]
    floats = [member for member in columns if is_float(member[1].dtype)]
    whole = [
        (name, column)
        for name, column in columns
        if not is_float(column.dtype) and column.dtype != "bool" and column.name not in stated
    ]
    for what, value in (("NaN", np.nan), ("infinity", np.inf), ("-infinity", -np.inf)):
        yield what, False, floats, _here_and_there(value, len(floats))
    yield "-0.0", False, floats, _here_and_there(-0.0, len(floats))
    yield "denormal numbers", False, floats, _up_to(0.25, tiny=True)
    for dtype in dict.fromkeys(column.dtype for _, column in floats):
        mine = [member for member in floats if member[1].dtype == dtype]
        for power in _HUGE:
            largest = torch.finfo(torch_dtype(dtype)).max ** power
            yield f"{dtype} numbers up to {largest:.0e}", False, mine, _up_to(largest)
    yield "integers of any size", True, whole, _any_size


def _here_and_there(value: float, count: int) -> Change:
    """The value in all columns of the first row, and in one column of each other row."""

    def change(column: Column, number: int, values: torch.Tensor) -> torch.Tensor:
        values[:1] = value
        values[1 + number % (_ROWS - 1) :: max(count, 1)] = value
        return values

    return change


def _up_to(largest: float, tiny: bool = False) -> Change:
    """Scale a column up to `largest`; `tiny`: up to that fraction of the smallest normal number."""

    def change(column: Column, number: int, values: torch.Tensor) -> torch.Tensor:
        unit = torch.finfo(values.dtype).tiny if tiny else 1.0
        known = values.double().nan_to_num(0.0, 0.0, 0.0)
        return (known / known.abs().max().clamp(min=1e-300) * (largest * unit)).to(values.dtype)

    return change


def _any_size(column: Column, number: int, values: torch.Tensor) -> torch.Tensor:
    """The least, the largest and random integers. No -1: least integer / -1 kills the process."""
    limits = np.iinfo(column.dtype)
    draw = np.random.default_rng(number)
    shape = tuple(values.shape)
    found = draw.integers(limits.min, limits.max, shape, column.dtype, endpoint=True)
    found[:1], found[1:2] = limits.min, limits.max
    found[2::2] = draw.choice([limits.min, limits.max], found[2::2].shape)
    if limits.min < 0:
        found[found == -1] = 1
    return torch.from_numpy(found)


def _first_rows(signature: Signature, inputs: Arrays, case: Case) -> Arrays:
    return {
        name: {
            column.name: columns[column.name]
            if column.kind == "scalar"
            else columns[column.name][: case[signature.rows_of[name]]]
            for column in signature.layouts[name].numbers
        }
        for name, columns in inputs_at(signature, inputs, case).items()
    }
