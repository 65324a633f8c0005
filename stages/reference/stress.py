"""Stress rows: ordinary values in every column, also where the user's file shows none.

A column that is constant, zero or one-sided in the file would hide a wrong artifact: it gives the
right answers as long as the column stays so. In stress rows every column varies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from engines.errors import first_line
from soa.dtypes import is_float, torch_dtype
from soa.layout import Column
from soa.signature import Signature, offsets_of
from stages.reference.answers import Arrays, Edge, MoreRows, run_eager, take_rows
from stages.reference.nonfinite import Case
from stages.reference.offsets import inputs_at

Kind = Literal["both signs", "positive", "own size", "own range", "own values"]
"""The kinds of stress rows. `own values` is for columns in which the model takes no other
values."""

_NAMES: Mapping[Kind, str] = {
    "both signs": "ordinary values of both signs",
    "positive": "ordinary positive values",
    "own size": "values of both signs as large as the column's own",
    "own range": "values within each column's own range",
}
_ROWS = 64
_FEW = 3  # how many integers a column gets that has only one value in the file


@dataclass(frozen=True)
class Member:
    """An input column that the model reads: its collection, and the column."""

    collection: str
    column: Column


def list_read_columns(signature: Signature) -> list[Member]:
    """List the input columns that the model reads, without the offsets of jagged rows."""
    offsets = {offsets_of(name) for name in signature.jagged}
    blocks = [bound.block for bound in signature.inputs]
    read = {(block.collection, column) for block in blocks for column in block.columns}
    return [
        Member(name, column)
        for name in signature.input_collections
        for column in signature.layouts[name].numbers
        if (name, column.name) in read and name not in offsets
    ]


@dataclass(frozen=True)
class SomeRows:
    """Some rows of the reference: their number in each dimension, and their inputs."""

    case: Case
    inputs: Arrays


def take_first_rows(signature: Signature, inputs: Arrays, wanted: int) -> SomeRows:
    """Take the first `wanted` rows of each dimension, or as near to that as its range allows."""
    ranges = {dim: signature.ranges[dim] for dim in signature.dims}
    case = {dim: min(max(wanted, rows.min), rows.proven) for dim, rows in ranges.items()}
    rows = {dim: slice(n) for dim, n in case.items()}
    return SomeRows(case, take_rows(signature, inputs_at(signature, inputs, case), rows))


@dataclass(frozen=True)
class Attempt:
    """The eager model's answers to some rows. If it fails on them, `failure` says why; else this is
    empty."""

    answers: dict[str, torch.Tensor]
    failure: str = ""


def try_model(model: torch.nn.Module, signature: Signature, rows: Arrays, case: Case) -> Attempt:
    """Run the eager model on the first rows of `rows`, as many as `case` says. No error of the
    model is raised: it is in the `failure` of the result."""
    try:
        return Attempt(run_eager(model, signature, rows, case))
    except Exception as error:  # the user's own code may raise any type
        return Attempt({}, first_line(error))


def make_stress_rows(model: torch.nn.Module, signature: Signature, inputs: Arrays) -> MoreRows:
    """Make rows in which every column varies, and run the eager model on them: an edge for each
    kind of values.

    If the model fails, the columns that make it fail when they alone are changed get values from
    the reference instead, and a note names them. If it still fails, there is only a note.
    """
    edges: list[Edge] = []
    notes: list[str] = []
    base = take_first_rows(signature, inputs, _ROWS)
    if not all(base.case.values()):
        return MoreRows()
    for seed, (kind, what) in enumerate(_NAMES.items()):
        rows = _stress_columns(signature, base.inputs, inputs, kind, seed)
        result = try_model(model, signature, rows, base.case)
        if result.failure:
            why = result.failure
            culprits = [
                member
                for member in list_read_columns(signature)
                if _attempt_with_column(model, signature, base, rows, member).failure
            ]
            rows = _stress_columns(signature, base.inputs, inputs, kind, seed, culprits)
            if len(culprits) < len(list_read_columns(signature)):
                result = try_model(model, signature, rows, base.case)
            if result.failure:
                notes.append(f"{what} in every column are not tried: {why}")
                continue
            names = ", ".join(sorted(f"{own.collection}.{own.column.name}" for own in culprits))
            notes.append(f"{what}: {names} keep their own values, else the model fails: {why}")
        edges.append(Edge(what, "stress", rows, base.case, result.answers))
    return MoreRows(tuple(edges), tuple(notes))


def _attempt_with_column(
    model: torch.nn.Module, signature: Signature, base: SomeRows, rows: Arrays, changed: Member
) -> Attempt:
    """Run the eager model on the rows `base`, of which only the column `changed` is taken from the
    stress rows `rows`."""
    inputs = {name: dict(columns) for name, columns in base.inputs.items()}
    name = changed.column.name
    inputs[changed.collection][name] = rows[changed.collection][name]
    return try_model(model, signature, inputs, base.case)


def _stress_columns(
    signature: Signature,
    base: Arrays,
    pool: Arrays,
    kind: Kind,
    seed: int,
    with_own_values: Collection[Member] = (),
) -> Arrays:
    """Copy the rows `base`, with new values of a `kind` in every column that the model reads.

    `pool` has the inputs of the whole reference, from which the sizes and ranges of the values are
    taken. The columns `with_own_values` get values that they have in `pool`.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = {name: dict(columns) for name, columns in base.items()}
    for member in list_read_columns(signature):
        name = member.column.name
        own_kind: Kind = "own values" if member in with_own_values else kind
        own = pool[member.collection][name]
        shape = rows[member.collection][name].shape
        rows[member.collection][name] = _draw_values(member.column, own, shape, own_kind, generator)
    return rows


def _draw_values(
    column: Column, own: torch.Tensor, shape: torch.Size, kind: Kind, generator: torch.Generator
) -> torch.Tensor:
    """Draw values of a kind for a column. `own` are its values in the reference. With the kind
    `own values` they are drawn from these, and a scalar stays as it is."""
    if kind == "own values":
        if own.ndim == 0:
            return own.clone()
        return own[torch.randint(len(own), shape[:1], generator=generator)]
    if column.dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    if is_float(column.dtype):
        return _draw_floats(own, shape, kind, generator).to(torch_dtype(column.dtype))
    return _draw_ints(own, shape, generator)


def _draw_floats(
    own: torch.Tensor, shape: torch.Size, kind: Kind, generator: torch.Generator
) -> torch.Tensor:
    """Draw floats of a kind for a column, as float64. `own` are its values in the reference."""
    finite = own.double()
    finite = finite[finite.isfinite()]
    if not finite.numel():
        finite = torch.zeros(1, dtype=torch.float64)
    if kind == "own range":
        low, high = float(finite.min()), float(finite.max())
        if low == high:  # it varies all the same: to both sides of its only value
            low, high = low - max(abs(low), 1.0), high + max(abs(high), 1.0)
        share = torch.rand(shape, generator=generator, dtype=torch.float64)
        return low * (1 - share) + high * share
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "positive":
        return normal.abs() + 0.01  # never 0
    if kind == "own size":
        largest = float(finite.abs().max())
        return normal * (largest or 1.0) / 2  # most are within two deviations, and so in its size
    return normal


def _draw_ints(own: torch.Tensor, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw integers within the range of a column's values in the reference, `own`, since an index
    beyond its table makes the model fail.

    The least integer of a signed dtype is never drawn: divided by -1 it kills the process.
    """
    limits = torch.iinfo(own.dtype)
    least = limits.min + 1 if limits.min < 0 else limits.min
    wide = own.long()  # torch has no smallest value of uint16 and uint32
    low, high = max(int(wide.min()), least), max(int(wide.max()), least)
    if low == high:
        high = min(low + _FEW - 1, limits.max)
    if high - low < 2**62:
        return torch.randint(low, high + 1, shape, generator=generator).to(own.dtype)
    # A wider range could overflow in randint. The clamp leaves no double too large for int64.
    share = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (low * (1 - share) + high * share).clamp(-(2.0**62), 2.0**62).to(own.dtype)
