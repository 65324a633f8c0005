"""Rows beside the user's own: stress rows, and rows with NaN, infinities, huge numbers, integers.

The eager model gives the expected answers. In stress rows every column takes ordinary values, and
an artifact with other answers is refused. So it is for integers of any size, which do occur. What
other answers to NaN, infinities and huge numbers mean is decided in stages/judging/edge_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np
import torch

from engines.errors import first_line
from soa.dtypes import is_float, torch_dtype
from soa.layout import Column
from soa.signature import Signature, offsets_of
from stages.errors import CaptureError
from stages.reference.answers import Arrays, Edge, EdgeKind, compute_reference
from stages.reference.nonfinite import Case
from stages.reference.offsets import inputs_at
from stages.reference.stress import KINDS, NAMES, members, narrowed, stressed

_ROWS = 37
_STRESS_ROWS = 64
# Powers of a dtype's largest number: squares of the second overflow, and sums of the third may.
_HUGE = (0.4, 0.55, 0.9, 1.0)

Change = Callable[[Column, int, torch.Tensor], torch.Tensor]
"""A function of a column, its index among the columns of its kind, and its values."""


def edge_rows(
    model: torch.nn.Module, signature: Signature, inputs: Arrays, stated: Collection[str] = ()
) -> tuple[tuple[Edge, ...], tuple[str, ...]]:
    """Rows with such values and the eager model's answers; a note where the model fails on them.

    The other values of such a row are from `inputs`. Integer columns named in `stated`, whose range
    the user gave, get no extreme values.
    """
    found: list[Edge] = []
    notes: list[str] = []
    case = edge_case(signature, _ROWS)
    if not all(case.values()):
        return (), ()
    few = first_rows(signature, inputs, case)
    for what, kind, columns, change in _kinds(signature, stated):
        if not columns:
            continue
        changed = {name: dict(own) for name, own in few.items()}
        for number, (name, column) in enumerate(columns):
            changed[name][column.name] = change(column, number, few[name][column.name].clone())
        try:
            (answers,) = compute_reference(model, signature, changed, (case,)).outputs
        except Exception as error:  # the user's own code may raise any type
            notes.append(f"{what} in the inputs are not tried: {first_line(error)}")
        else:
            found.append(Edge(what, kind, changed, case, answers))
    return tuple(found), tuple(notes)


def stress_rows(
    model: torch.nn.Module, signature: Signature, inputs: Arrays
) -> tuple[tuple[Edge, ...], tuple[str, ...]]:
    """Rows in which every column varies, and the eager model's answers; notes on what the model
    does not take.

    If the model fails, the columns that make it fail get values from the reference instead.
    """
    found: list[Edge] = []
    notes: list[str] = []
    case = edge_case(signature, _STRESS_ROWS)
    if not all(case.values()):
        return (), ()
    few = first_rows(signature, inputs, case)

    def answers(rows: Arrays) -> dict[str, torch.Tensor]:
        return compute_reference(model, signature, rows, (case,)).outputs[0]

    for seed, kind in enumerate(KINDS):
        rows = stressed(signature, few, inputs, kind, seed)
        try:
            found.append(Edge(NAMES[kind], "stress", rows, case, answers(rows)))
            continue
        except Exception as error:  # the user's own code may raise any type
            why = first_line(error)
        own = narrowed(signature, few, inputs, kind, seed, answers)
        mine = {(one.collection, one.column.name) for one in own}
        rows = stressed(signature, few, inputs, kind, seed, mine)
        try:
            if len(mine) == len(members(signature)):
                raise CaptureError(why)
            found.append(Edge(NAMES[kind], "stress", rows, case, answers(rows)))
        except Exception:  # as above
            notes.append(f"{NAMES[kind]} in every column are not tried: {why}")
        else:
            names = ", ".join(".".join(each) for each in sorted(mine))
            notes.append(
                f"{NAMES[kind]}: {names} keep their own values, else the model fails: {why}"
            )
    return tuple(found), tuple(notes)


def edge_case(signature: Signature, wanted: int) -> Case:
    """`wanted` rows of each dimension, within its range."""
    ranges = {dim: signature.ranges[dim] for dim in signature.dims}
    return {dim: min(max(wanted, rows.min), rows.proven) for dim, rows in ranges.items()}


Member = tuple[str, Column]
Kind = tuple[str, EdgeKind, list[Member], Change]


def _kinds(signature: Signature, stated: Collection[str]) -> Iterator[Kind]:
    """Each kind of value: its name, how it is judged, the columns, and the function that changes
    them."""
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
        yield what, "special", floats, _here_and_there(value, len(floats))
    yield "-0.0", "special", floats, _here_and_there(-0.0, len(floats))
    yield "denormal numbers", "extreme", floats, _up_to(0.25, tiny=True)
    for dtype in dict.fromkeys(column.dtype for _, column in floats):
        mine = [member for member in floats if member[1].dtype == dtype]
        for power in _HUGE:
            largest = torch.finfo(torch_dtype(dtype)).max ** power
            yield f"{dtype} numbers up to {largest:.0e}", "extreme", mine, _up_to(largest)
    yield "integers of any size", "integers", whole, _any_size


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


def first_rows(signature: Signature, inputs: Arrays, case: Case) -> Arrays:
    """The rows of a case."""
    return {
        name: {
            column.name: columns[column.name]
            if column.kind == "scalar"
            else columns[column.name][: case[signature.rows_of[name]]]
            for column in signature.layouts[name].numbers
        }
        for name, columns in inputs_at(signature, inputs, case).items()
    }
