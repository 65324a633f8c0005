"""Guarded memory: access past an end kills the process; the bytes inside are ordinary memory."""

from __future__ import annotations

import ctypes
import mmap
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.checked.poison import Side, allocate_guarded, make_guarded_collection
from soa import Collection, Layout, column, eigen, scalar
from tests.models.forked import ended

BUFFER = Layout([column("a", "float32"), eigen("m", "float64", 2, 2), scalar("s", "int8")])
SEPARATE = Layout(list(BUFFER.columns), 64, "columns")


@given(
    layout=st.sampled_from([BUFFER, SEPARATE]),
    n=st.integers(0, 300),
    spare=st.integers(0, 70),
    side=st.sampled_from(["front", "back"]),
)
def test_a_guarded_collection_is_an_ordinary_one(
    layout: Layout, n: int, spare: int, side: Side
) -> None:
    collection = make_guarded_collection(layout, n, n + spare, side)
    plain = Collection(layout, n, capacity=n + spare)
    assert (collection.n, collection.capacity, collection.readonly) == (n, n + spare, False)
    for piece, plain_piece in zip(collection.memory(), plain.memory(), strict=True):
        assert piece.shape == plain_piece.shape
        assert not piece.view(torch.uint8).any()
        piece.view(torch.uint8).fill_(7)


PAGE = mmap.PAGESIZE


def exit_code_of_read(address: int) -> int:
    """How a child ends that reads the byte at `address`."""
    return ended(lambda: ctypes.c_uint8.from_address(address).value)


@pytest.mark.parametrize("nbytes", [0, 4, 128, PAGE, PAGE + 384])
@pytest.mark.parametrize("side", ["front", "back"])
def test_one_byte_past_the_end_kills(nbytes: int, side: Side) -> None:
    span = allocate_guarded(nbytes, 4, side)
    past = span.address - 1 if side == "front" else span.address + nbytes
    assert exit_code_of_read(past) == -signal.SIGSEGV


@pytest.mark.parametrize("nbytes", [4, 128, PAGE, PAGE + 384])
@pytest.mark.parametrize("side", ["front", "back"])
def test_the_last_byte_before_the_end_can_be_read(nbytes: int, side: Side) -> None:
    span = allocate_guarded(nbytes, 4, side)
    assert exit_code_of_read(span.address if side == "front" else span.address + nbytes - 1) == 0


def test_the_mapping_lives_as_long_as_its_views() -> None:
    view = allocate_guarded(1000, 128, "back").numpy()[10:20]
    for _ in range(50):
        allocate_guarded(1000, 128, "front").numpy()[:] = 1
    assert not view.any()
