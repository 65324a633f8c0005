"""Random layouts and values, for hypothesis."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from soa.dtypes import DTYPES, is_float, torch_dtype
from soa.layout import Column, Layout

ALIGNMENTS = (8, 16, 64, 128, 256)
ROWS = st.sampled_from([0, 1, 2, 3, 31, 32, 33, 64, 100])


@st.composite
def members(draw: st.DrawFn, name: str, dtypes: tuple[str, ...] = DTYPES) -> Column:
    """A member of any kind; half of them are plain columns."""
    dtype = draw(st.sampled_from(dtypes))
    kind = draw(st.sampled_from(["column", "column", "scalar", "eigen"]))
    if kind == "eigen":
        shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
        return Column(name, dtype, "eigen", tuple(shape))
    return Column(name, dtype, "scalar" if kind == "scalar" else "column")


@st.composite
def layouts(
    draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES, storages: tuple[str, ...] = ("buffer",)
) -> Layout:
    """A layout of one to seven members, of these dtypes and kinds of storage."""
    count = draw(st.integers(1, 7))
    columns = [draw(members(f"c{i}", dtypes)) for i in range(count)]
    alignment = draw(st.sampled_from(ALIGNMENTS))
    if draw(st.sampled_from(storages)) == "columns":
        return Layout(columns, draw(st.sampled_from([1, alignment])), "columns")
    return Layout(columns, alignment)


def values_of(layout: Layout, n: int, seed: int) -> dict[str, torch.Tensor]:
    """Values that every dtype holds exactly, in the shapes of `Collection.from_arrays`."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for member in layout.columns:
        shape = () if member.kind == "scalar" else (n, *member.shape)
        low = -100 if is_float(member.dtype) or member.dtype.startswith("int") else 0
        high = 2 if member.dtype == "bool" else 100
        whole = torch.randint(low, high, shape, generator=generator)
        values[member.name] = whole.to(torch_dtype(member.dtype))
    return values
