"""Rows with NaN, infinities, huge numbers and integers of any size.

The eager model gives the expected answers. An artifact with other answers to integers, which do
occur, is refused. What other answers to NaN, infinities and huge numbers mean is decided in
stages/judging/edge_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from soa.dtypes import is_float, torch_dtype
from soa.layout import Column
from soa.signature import Signature
from stages.reference.answers import Arrays, Edge, EdgeKind, MoreRows
from stages.reference.stress import Member, list_read_columns, take_first_rows, try_model

_ROWS = 37
# Powers of a dtype's largest number: squares of the second overflow, and sums of the third may.
_HUGE = (0.4, 0.55, 0.9, 1.0)

Change = Callable[[Column, int, torch.Tensor], torch.Tensor]
"""A function of a column, its index among the columns that change, and its values."""


@dataclass(frozen=True)
class _Changes:
    """A kind of values to try: its name for reports, how the answers are judged, the columns that
    get such values, and the function that makes them."""

    what: str
    kind: EdgeKind
    members: list[Member]
    change: Change


def make_edge_rows(
    model: torch.nn.Module, signature: Signature, inputs: Arrays, stated: Collection[str] = ()
) -> MoreRows:
    """Make rows with NaN, infinities, huge and denormal numbers, and integers of any size, and run
    the eager model on them: an edge for each kind of value. If it fails on a kind, there is a note.

    The other values of a row are those in `inputs`. Integer columns named in `stated`, whose range
    the user gave, get no extreme values.
    """
    edges: list[Edge] = []
    notes: list[str] = []
    plain = take_first_rows(signature, inputs, _ROWS)
    if not all(plain.case.values()):
        return MoreRows()
    for changes in _changes(signature, stated):
        if not changes.members:
            continue
        changed = {name: dict(columns) for name, columns in plain.inputs.items()}
        for number, member in enumerate(changes.members):
            columns = changed[member.collection]
            name = member.column.name
            columns[name] = changes.change(member.column, number, columns[name].clone())
        result = try_model(model, signature, changed, plain.case)
        if result.failure:
            notes.append(f"{changes.what} in the inputs are not tried: {result.failure}")
        else:
            edges.append(Edge(changes.what, changes.kind, changed, plain.case, result.answers))
    return MoreRows(tuple(edges), tuple(notes))


def _changes(signature: Signature, stated: Collection[str]) -> Iterator[_Changes]:
    """Yield the kinds of values to try, each with the columns that get them. A kind may have no
    columns."""
    columns = [member for member in list_read_columns(signature) if member.column.kind != "scalar"]
    floats = [member for member in columns if is_float(member.column.dtype)]
    integers = [
        member
        for member in columns
        if not is_float(member.column.dtype)
        and member.column.dtype != "bool"
        and member.column.name not in stated
    ]
    specials = {"NaN": np.nan, "infinity": np.inf, "-infinity": -np.inf, "-0.0": -0.0}
    for what, value in specials.items():
        yield _Changes(what, "special", floats, _setter_here_and_there(value, len(floats)))
    yield _Changes("denormal numbers", "extreme", floats, _scaler_up_to(0.25, tiny=True))
    for dtype in dict.fromkeys(member.column.dtype for member in floats):
        of_dtype = [member for member in floats if member.column.dtype == dtype]
        for power in _HUGE:
            largest = torch.finfo(torch_dtype(dtype)).max ** power
            name = f"{dtype} numbers up to {largest:.0e}"
            yield _Changes(name, "extreme", of_dtype, _scaler_up_to(largest))
    yield _Changes("integers of any size", "integers", integers, _draw_any_size)


def _setter_here_and_there(value: float, count: int) -> Change:
    """Return a function that puts `value` into a column: in the first row, and in some of the
    others.

    The first row then has it in all of `count` columns, each other row in one of them.
    """

    def change(column: Column, number: int, values: torch.Tensor) -> torch.Tensor:
        values[:1] = value
        # Each column begins one row later than the one before, and takes every `count`-th row.
        values[1 + number % (_ROWS - 1) :: max(count, 1)] = value
        return values

    return change


def _scaler_up_to(largest: float, tiny: bool = False) -> Change:
    """Return a function that scales a column so that its largest absolute value is `largest`; if
    `tiny`, `largest` times the smallest normal number of its dtype. NaN and infinities become 0."""

    def change(column: Column, number: int, values: torch.Tensor) -> torch.Tensor:
        unit = torch.finfo(values.dtype).tiny if tiny else 1.0
        finite = values.double().nan_to_num(0.0, 0.0, 0.0)
        own_largest = finite.abs().max().clamp(min=1e-300)  # a column of zeros stays so
        return (finite / own_largest * (largest * unit)).to(values.dtype)

    return change


def _draw_any_size(column: Column, number: int, values: torch.Tensor) -> torch.Tensor:
    """Draw integers for a column, in the shape of `values`: the least and the largest of its dtype,
    and random ones. -1 becomes 1: the least integer divided by -1 kills the process."""
    limits = np.iinfo(column.dtype)
    draw = np.random.default_rng(number)
    shape = tuple(values.shape)
    integers = draw.integers(limits.min, limits.max, shape, column.dtype, endpoint=True)
    integers[:1], integers[1:2] = limits.min, limits.max
    integers[2::2] = draw.choice([limits.min, limits.max], integers[2::2].shape)
    if limits.min < 0:
        integers[integers == -1] = 1
    return torch.from_numpy(integers)
