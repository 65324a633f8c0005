"""Poison and canaries: a changed byte is noticed, wherever it lies."""

from __future__ import annotations

import pytest
import torch

from runtime.checked.poison import make_poisoned, same_bytes, wrote_outside
from soa import Block, Layout, RowRange, Signature, column, eigen, scalar
from soa.layout import Storage

STORAGES: tuple[Storage, ...] = ("buffer", "columns")


def layout(storage: Storage = "buffer") -> Layout:
    """A layout of all kinds of columns."""
    return Layout(
        [
            column("x", "float32"),
            column("other", "float32"),
            eigen("m", "float32", 2, 2),
            scalar("s", "float32"),
            column("flag", "bool"),
        ],
        storage=storage,
    )


def signature(storage: Storage) -> Signature:
    """Outputs are `x`, `m` and `s` of the collection `o`, but neither `other` nor `flag`."""
    return Signature.build(
        {"i": Layout([column("a", "float32")]), "o": layout(storage)},
        [Block("features", "i", ("a",))],
        [Block("one", "o", ("x",)), Block("two", "o", ("m",)), Block("three", "o", ("s",))],
        {"n": RowRange(0, 10)},
    )


@pytest.mark.parametrize("storage", STORAGES)
def test_every_byte_is_poisoned(storage: Storage) -> None:
    collection = make_poisoned(layout(storage), 5, 9, 0x5A)
    assert (collection.n, collection.capacity) == (5, 9)
    assert all((piece.view(torch.uint8) == 0x5A).all() for piece in collection.memory())


@pytest.mark.parametrize("storage", STORAGES)
def test_floats_of_the_poison_0xff_are_nan(storage: Storage) -> None:
    assert make_poisoned(layout(storage), 5, 5, 0xFF).tensor("x").isnan().all()


@pytest.mark.parametrize("storage", STORAGES)
def test_a_copy_holds_bytes_that_are_no_value(storage: Storage) -> None:
    collection = make_poisoned(layout(storage), 5, 9, 0xFF)  # 0xFF is not a valid bool
    copy = collection.to(collection.device)
    assert same_bytes(collection, copy)
    assert not wrote_outside(signature(storage), "o", copy, collection)


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_in_use_of_the_outputs_may_change(storage: Storage) -> None:
    before = make_poisoned(layout(storage), 5, 9, 0xFF)
    after = before.to(before.device)
    for component in range(4):
        after.span("m", component).tensor()[:5] = 1.0
    after.span("x").tensor()[:5] = 2.0
    after.span("s").tensor()[0] = 3.0
    assert not same_bytes(before, after)
    assert not wrote_outside(signature(storage), "o", before, after)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("column", "component", "row"),
    [("x", 0, 5), ("other", 0, 0), ("m", 3, 5), ("flag", 0, 0)],  # 5: behind the last row
)
def test_any_other_byte_is_seen(storage: Storage, column: str, component: int, row: int) -> None:
    before = make_poisoned(layout(storage), 5, 9, 0xFF)
    after = before.to(before.device)
    after.span(column, component).raw().numpy()[row * after.layout[column].own_alignment] = 0
    assert wrote_outside(signature(storage), "o", before, after)


def test_the_last_byte_of_the_padding_is_seen() -> None:
    before = make_poisoned(layout(), 5, 9, 0xFF)
    after = before.to(before.device)
    assert after.buffer is not None
    after.buffer[-1] = 0
    assert wrote_outside(signature("buffer"), "o", before, after)
