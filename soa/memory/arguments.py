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
    """Return the argument that tells an artifact how many rows there are: `(n, 0)`, no memory."""
    return Span(0, "float32", (n, 0), device)


def argument_spans(
    signature: Signature, collections: Mapping[str, Collection], rows: Mapping[str, int]
) -> list[Span]:
    """Return the memory of each of `signature.arguments`, in order.

    `collections` and `rows`, the n of each row dimension, must fit the signature: the caller has
    checked them.
    """
    device = next(iter(collections.values())).device
    spans = []
    for argument in signature.arguments:
        if argument.kind == "carrier":
            spans.append(carrier(rows[argument.rows], device))
            continue
        collection = collections[argument.collection]
        if argument.kind == "matrix":
            span = collection.run(argument.column, argument.component, argument.count)
        else:
            span = collection.span(argument.column, argument.component)
        spans.append(span.first(rows[argument.rows]) if argument.kind == "column" else span)
    return spans


def argument_tensors(
    signature: Signature, collections: Mapping[str, Collection], rows: Mapping[str, int]
) -> list[torch.Tensor]:
    """Return the spans of `argument_spans` as torch tensors over the same memory."""
    return [span.tensor() for span in argument_spans(signature, collections, rows)]


def read_block(
    bound: BoundBlock, collection: Collection, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Copy a block into a new tensor on `device`, in the shape that the model sees or returns.

    The tensor has the dtype of the block's columns. If these differ, it has the widest
    floating-point dtype among them, or the widest dtype if none is a floating-point one.
    """
    import torch

    n = 1 if bound.plan.kind == "scalars" else collection.n
    widest = torch_dtype(max(bound.plan.dtypes, key=lambda name: (is_float(name), itemsize(name))))
    layout = collection.layout
    features = [
        collection.span(name, layout[name].component_of(i)).first(n).tensor().to(device, widest)
        for name in bound.block.columns
        for i in range(layout[name].components)
    ]
    block = torch.stack(features, dim=1).reshape(bound.shape(n))
    if bound.block.broadcast:  # it has one row, which is repeated for each row
        return block.repeat(collection.n, *[1] * (block.dim() - 1))
    return block
