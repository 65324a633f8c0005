"""Whether a run touched memory that is not its own: poison before, compare after."""

from __future__ import annotations

import torch

from runtime.checked.guarded import Side, guarded_collection
from soa.layout import Layout
from soa.memory import Collection
from soa.signature import Signature


def poisoned(
    layout: Layout,
    n: int,
    capacity: int,
    pattern: int,
    device: torch.device | str = "cpu",
    guard: Side | None = None,
) -> Collection:
    """A collection whose every byte, padding included, is `pattern`.

    `guard`: on a CPU, which end of the memory touches a page that nobody may touch.
    """
    if guard and torch.device(device).type == "cpu":
        collection = guarded_collection(layout, n, capacity, guard)
    else:
        collection = Collection(layout, n, device, capacity=capacity)
    for piece in collection.memory():
        piece.view(torch.uint8).fill_(pattern)
    return collection


def snapshot(collection: Collection) -> Collection:
    """A copy of every byte, padding included; a plain copy makes a bool of a byte that is none."""
    copy = collection.to(collection.device)
    for theirs, mine in zip(copy.memory(), collection.memory(), strict=True):
        theirs.view(torch.uint8).copy_(mine.view(torch.uint8))
    return copy


def same_bytes(one: Collection, other: Collection) -> bool:
    """Whether two collections of one layout and capacity hold the same bytes, padding included."""
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one.memory(), other.memory(), strict=True)
    )


def wrote_outside(signature: Signature, name: str, before: Collection, after: Collection) -> bool:
    """Whether anything but the rows in use of the output columns of collection `name` changed."""
    expected = snapshot(before)
    for bound in signature.outputs:
        if bound.block.collection == name:
            n = 1 if bound.plan.kind == "scalars" else after.n
            for column, k in bound.plan.components:
                expected.component(column, k)[:n] = after.component(column, k)[:n]
    return not same_bytes(expected, after)
