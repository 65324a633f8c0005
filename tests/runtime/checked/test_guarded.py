"""Guarded memory: access past an end kills the process; the bytes inside are ordinary memory."""

from __future__ import annotations

import ctypes
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.checked.poison import Side, guarded, guarded_collection
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
    found = guarded_collection(layout, n, n + spare, side)
    plain = Collection(layout, n, capacity=n + spare)
    assert (found.n, found.capacity, found.readonly) == (n, n + spare, False)
    for mine, theirs in zip(found.memory(), plain.memory(), strict=True):
        assert mine.shape == theirs.shape
        assert not mine.view(torch.uint8).any()
        mine.view(torch.uint8).fill_(7)


@pytest.mark.parametrize("nbytes", [0, 4, 128, 4096, 4096 + 384])
@pytest.mark.parametrize(("side", "at"), [("front", -1), ("back", 0)])
def test_one_byte_past_the_end_kills(nbytes: int, side: Side, at: int) -> None:
    def touch(address: int) -> int:
        return ended(lambda: ctypes.c_uint8.from_address(address).value)

    span = guarded(nbytes, 4, side)
    past = at if side == "front" else nbytes
    assert touch(span.address + past) == -signal.SIGSEGV
    if nbytes:
        assert touch(span.address + (0 if side == "front" else nbytes - 1)) == 0


def test_the_mapping_lives_as_long_as_its_views() -> None:
    view = guarded(1000, 128, "back").numpy()[10:20]
    for _ in range(50):
        guarded(1000, 128, "front").numpy()[:] = 1
    assert not view.any()
