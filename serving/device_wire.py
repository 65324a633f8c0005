"""Columns in GPU memory to the arrays of a request and back, by copies on that device alone.

The counterpart of `WireTensor.gather` and `scatter`, which are NumPy's.
"""

from __future__ import annotations

import torch

from serving.wire import WireTensor
from soa.dtypes import torch_dtype

Columns = tuple[torch.Tensor | None, list[torch.Tensor]]
"""The physical columns of a tensor: the matrix where they are one, and each by itself."""


def to_wire(t: WireTensor, columns: Columns, n: int, memory: torch.Tensor) -> None:
    """`n` rows of the columns into the tensor's contiguous memory, in stream order."""
    table, count = _table(t, memory, n)
    matrix, each = columns
    if matrix is not None and t.in_order:
        table.copy_(matrix[:, :count])
        return
    for row, k in zip(table, t.order, strict=True):
        row.copy_(each[k][:count])


def from_wire(t: WireTensor, columns: Columns, n: int, memory: torch.Tensor) -> None:
    """The other way: what lies behind the first `n` rows stays as it is."""
    table, count = _table(t, memory, n)
    matrix, each = columns
    if matrix is not None and t.in_order:
        matrix[:, :count].copy_(table)
        return
    for row, k in zip(table, t.order, strict=True):
        each[k][:count].copy_(row)


def _table(t: WireTensor, memory: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
    """The memory as (entries of a row, rows), a view, and how many rows that is."""
    flat = memory.view(-1).view(torch_dtype(t.column_dtype))
    count = 1 if t.scalar else n
    if t.rows_last:
        return flat.view(len(t.order), count), count
    return flat.view(count, len(t.order)).T, count
