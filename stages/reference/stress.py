"""Stress rows: ordinary values in every column, also where the user's file shows none.

A column that is constant, zero or one-sided in the file would hide a wrong artifact: it gives the
right answers as long as the column stays so. In stress rows every column varies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from soa.dtypes import is_float, torch_dtype
from soa.layout import Column
from soa.signature import Signature, offsets_of

Columns = dict[str, torch.Tensor]
Inputs = dict[str, Columns]
Kind = Literal["both signs", "positive", "own size", "own range", "own values"]
KINDS: tuple[Kind, ...] = ("both signs", "positive", "own size", "own range")
"""The kinds of stress rows. `own values` is no kind: it is for columns in which the model takes no
other values."""

NAMES: Mapping[str, str] = {
    "both signs": "ordinary values of both signs",
    "positive": "ordinary positive values",
    "own size": "values of both signs as large as the column's own",
    "own range": "values within each column's own range",
}
_FEW = 3  # the integers in a column that has one value in the file


@dataclass(frozen=True)
class Member:
    """An input column that the model reads: its collection, and the column."""

    collection: str
    column: Column


def members(signature: Signature) -> list[Member]:
    """The input columns that the model reads, without the offsets of jagged rows."""
    offsets = {offsets_of(name) for name in signature.jagged}
    read = {(b.block.collection, c) for b in signature.inputs for c in b.block.columns}
    return [
        Member(name, column)
        for name in signature.input_collections
        for column in signature.layouts[name].numbers
        if (name, column.name) in read and name not in offsets
    ]


def stressed(
    signature: Signature,
    few: Inputs,
    pool: Inputs,
    kind: Kind,
    seed: int,
    kept: Collection[tuple[str, str]] = (),
) -> Inputs:
    """The rows `few`, with new values in every column that the model reads.

    Sizes and ranges are those of the columns of `pool`, the whole reference. The columns `kept` get
    values that they have in `pool`.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {name: dict(columns) for name, columns in few.items()}
    for one in members(signature):
        name = one.column.name
        mine: Kind = "own values" if (one.collection, name) in kept else kind
        own = pool[one.collection][name]
        shape = found[one.collection][name].shape
        found[one.collection][name] = drawn(one.column, own, shape, mine, generator)
    return found


def drawn(
    column: Column, own: torch.Tensor, shape: torch.Size, kind: Kind, generator: torch.Generator
) -> torch.Tensor:
    """Values of a kind for a column, whose values in the reference are `own`. Scalars stay as they
    are with the kind `own values`."""
    if kind == "own values":
        if own.ndim == 0:
            return own.clone()
        return own[torch.randint(len(own), shape[:1], generator=generator)]
    if column.dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    if is_float(column.dtype):
        return _floats(own, shape, kind, generator).to(torch_dtype(column.dtype))
    return _integers(own, shape, generator)


def _floats(
    own: torch.Tensor, shape: torch.Size, kind: Kind, generator: torch.Generator
) -> torch.Tensor:
    known = own.double()
    known = known[known.isfinite()]
    largest = float(known.abs().max()) if known.numel() else 0.0
    if kind == "own range":
        low, high = (float(known.min()), float(known.max())) if known.numel() else (0.0, 0.0)
        if low == high:  # it varies all the same: to both sides of its only value
            low, high = low - max(abs(low), 1.0), high + max(abs(high), 1.0)
        share = torch.rand(shape, generator=generator, dtype=torch.float64)
        return low * (1 - share) + high * share
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "positive":
        return normal.abs() + 0.01
    return normal * (largest or 1.0) / 2 if kind == "own size" else normal


def _integers(own: torch.Tensor, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Integers within the column's own range: an index beyond its table makes the model fail.

    Never the least integer of a dtype with a sign: divided by -1 it kills the process.
    """
    limits = torch.iinfo(own.dtype)
    least = limits.min + 1 if limits.min < 0 else limits.min
    wide = own.long()  # torch has no smallest value of uint16 and uint32
    low, high = max(int(wide.min()), least), max(int(wide.max()), least)
    if low == high:
        high = min(low + _FEW - 1, limits.max)
    if high - low < 2**62:
        return torch.randint(low, high + 1, shape, generator=generator).to(own.dtype)
    share = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (low * (1 - share) + high * share).clamp(-(2.0**62), 2.0**62).to(own.dtype)


Try = Callable[[Inputs], object]
"""Computes the model's answers to rows, or raises the model's error."""


def narrowed(
    signature: Signature, few: Inputs, pool: Inputs, kind: Kind, seed: int, attempt: Try
) -> Iterator[Member]:
    """The columns whose new values alone make the model fail: it takes no others than it knows."""
    changed = stressed(signature, few, pool, kind, seed)
    for one in members(signature):
        trial = {name: dict(columns) for name, columns in few.items()}
        trial[one.collection][one.column.name] = changed[one.collection][one.column.name]
        try:
            attempt(trial)
        except Exception:  # the user's own code may raise any type
            yield one
