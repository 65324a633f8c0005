"""Give a signature's arguments as views of the caller's memory, and copies of a block's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from soa.dtypes import is_float, itemsize, torch_dtype
from soa.memory.collection import Collection
from soa.memory.span import CPU, Device, Span
from soa.signature import BoundBlock, Signature

if TYPE_CHECKING:
    import torch


def carrier(n: int, device: Device = CPU) -> Span:
    """The argument whose shape carries a row count: `(n, 0)`, no memory."""
    return Span(0, "float32", (n, 0), device)


def argument_spans(
    signature: Signature, collections: Mapping[str, Collection], rows: Mapping[str, int]
) -> list[Span]:
    """The memory of each of `signature.arguments`. The caller has checked collections and rows."""
    device = next(iter(collections.values())).device
    spans = []
    for a in signature.arguments:
        if a.kind == "carrier":
            span = carrier(rows[a.rows], device)
        elif a.kind == "matrix":
            span = collections[a.collection].run(a.column, a.component, a.count)
        else:
            span = collections[a.collection].span(a.column, a.component)
            span = span if a.kind == "scalar" else span.first(rows[a.rows])
        spans.append(span)
    return spans


def argument_tensors(
    signature: Signature, collections: Mapping[str, Collection], rows: Mapping[str, int]
) -> list[torch.Tensor]:
    """The spans of `argument_spans` as torch tensors over the same memory."""
    return [span.tensor() for span in argument_spans(signature, collections, rows)]


def read_block(
    bound: BoundBlock, collection: Collection, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Copy a block into a new tensor on `device`, in the shape that the model sees or returns.

    The dtype is that of the block's columns; if they differ in width, the widest one.
    """
    import torch

    n = 1 if bound.plan.kind == "scalars" else collection.n
    widest = torch_dtype(max(bound.plan.dtypes, key=lambda d: (is_float(d), itemsize(d))))
    layout = collection.layout
    parts = [
        collection.span(name, layout[name].component_of(i)).first(n).tensor().to(device, widest)
        for name in bound.block.columns
        for i in range(layout[name].components)
    ]
    block = torch.stack(parts, dim=1).reshape(bound.shape(n))
    return block.repeat(collection.n, *[1] * (block.dim() - 1)) if bound.block.broadcast else block
