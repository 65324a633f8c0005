"""Columns in GPU memory to the arrays of a request and back, by copies on that device alone.

The counterpart of `WireTensor.gather` and `scatter`, which are NumPy's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serving.wire import Location, WireTensor
from soa.dtypes import torch_dtype


def copy_in(
    t: WireTensor, location: Location, arguments: Sequence[torch.Tensor], n: int, into: torch.Tensor
) -> None:
    """`n` rows of the tensor's columns into its bytes on the wire, in stream order."""
    table, count = _table(t, into, n)
    matrix, columns = location.tensors(arguments)
    if matrix is not None and t.in_order:
        table.copy_(matrix[:, :count])
        return
    for row, k in zip(table, t.order, strict=True):
        row.copy_(columns[k][:count])


def copy_out(
    t: WireTensor, location: Location, arguments: Sequence[torch.Tensor], n: int, of: torch.Tensor
) -> None:
    """The other way: what lies behind the first `n` rows stays as it is."""
    table, count = _table(t, of, n)
    matrix, columns = location.tensors(arguments)
    if matrix is not None and t.in_order:
        matrix[:, :count].copy_(table)
        return
    for row, k in zip(table, t.order, strict=True):
        columns[k][:count].copy_(row)


def _table(t: WireTensor, memory: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
    """The wire's bytes as (entries of a row, rows), a view, and how many rows that is."""
    flat = memory.view(torch_dtype(t.column_dtype))
    count = 1 if t.scalar else n
    if t.rows_last:
        return flat.view(len(t.order), count), count
    return flat.view(count, len(t.order)).T, count
