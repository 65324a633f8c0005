"""The arguments of an artifact as views of the caller's memory: no byte is copied."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from soa.memory.collection import Collection
from soa.signature import Argument, Signature


def carrier(n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The tensor whose shape carries a row count: `(n, 0)`, no memory."""
    return torch.empty((n, 0), device=device)


def argument_tensors(
    signature: Signature, collections: Mapping[str, Collection], rows: Mapping[str, int]
) -> list[torch.Tensor]:
    """Views in the order of `signature.arguments`; collections and rows are already checked."""
    device = next(iter(collections.values())).device
    return [_tensor(argument, collections, rows, device) for argument in signature.arguments]


def _tensor(
    argument: Argument,
    collections: Mapping[str, Collection],
    rows: Mapping[str, int],
    device: torch.device,
) -> torch.Tensor:
    if argument.kind == "carrier":
        return carrier(rows[argument.rows], device)
    collection = collections[argument.collection]
    if argument.kind == "matrix":
        return collection.matrix(argument.column, argument.component, argument.count)
    piece = collection.component(argument.column, argument.component)
    return piece if argument.kind == "scalar" else piece.narrow(0, 0, rows[argument.rows])
