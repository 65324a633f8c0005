"""Values into a collection and out of it, by copy, component by component.

It serves references and checks; running a model copies nothing.
"""

from __future__ import annotations

import torch

from soa.dtypes import is_float, torch_dtype
from soa.layout import Column
from soa.memory.collection import Collection
from soa.signature import BoundBlock


def fill_column(collection: Collection, column: Column, values: torch.Tensor) -> None:
    """Copy values, `(n, ...)` (more rows are left out) or `()`, into a member's columns."""
    if column.kind == "scalar":
        collection.component(column.name).copy_(values.reshape(1))
        return
    n = collection.n
    flat = values[:n].reshape(n, column.components)
    for i in range(column.components):
        part = collection.component(column.name, column.component_of(i))
        part.narrow(0, 0, n).copy_(flat[:, i])


def read_block(bound: BoundBlock, collection: Collection) -> torch.Tensor:
    """A block as a CPU tensor of its own, in the shape the model sees or gives.

    Its dtype is that of its columns; where they differ in width, the widest.
    """
    n = 1 if bound.plan.kind == "scalars" else collection.n
    widest = max(bound.plan.dtypes, key=lambda d: (is_float(d), torch_dtype(d).itemsize))
    layout = collection.layout
    parts = [
        collection.component(name, layout[name].component_of(i))[:n].to("cpu", torch_dtype(widest))
        for name in bound.block.columns
        for i in range(layout[name].components)
    ]
    return torch.stack(parts, dim=1).reshape(bound.shape(n))
