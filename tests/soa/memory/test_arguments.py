"""An artifact's arguments are views of the collections, with the right shapes and addresses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from soa.block import Block
from soa.layout import Layout, column, eigen, scalar
from soa.memory import Collection, argument_tensors, carrier, read_block
from soa.signature import RowRange, Signature
from tests.soa.strategies import values_of

JETS = Layout(
    [
        column("pt", "float32"),
        column("eta", "float32"),
        column("q", "int8"),
        eigen("cov", "float32", 2, 3),
        scalar("run", "uint32"),
    ]
)
TAGS = Layout([column("b", "float32"), column("c", "float64")], 16, "columns")
SIGNATURE = Signature.build(
    {"jets": JETS, "tags": TAGS},
    [
        Block("kinematics", "jets", ("eta", "pt")),
        Block("mixed", "jets", ("q", "pt"), "float32"),
        Block("cov", "jets", ("cov",)),
        Block("event", "jets", ("run",)),
    ],
    [Block("scores", "tags", ("b", "c"), "float32")],
    {"n": RowRange(0, 100)},
)


def test_arguments_are_views_of_the_collections() -> None:
    jets, tags = Collection(JETS, 33, capacity=40), Collection(TAGS, 33, capacity=40)
    tensors = argument_tensors(SIGNATURE, {"jets": jets, "tags": tags}, {"n": 33})
    # capacity 40: 160 -> 256 bytes, 64 floats a column
    shapes = [(33, 0), (2, 64), (33,), (33,), (6, 64), (1,), (33,), (33,)]
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    assert all(tensor.is_contiguous() for tensor in tensors)
    # pt 0, eta 256, q 512 (40 -> 128), cov 640, run 640 + 6 * 256 = 2176
    places = [tensor.data_ptr() - jets.data_ptr for tensor in tensors[1:6]]
    assert places == [0, 512, 0, 640, 2176]
    assert [x.data_ptr() for x in tensors[6:]] == [tags.span(name).address for name in "bc"]


def test_a_carrier_has_rows_and_no_memory() -> None:
    assert carrier(5).shape == (5, 0)
    assert carrier(0).nbytes == carrier(5).nbytes == 0


VALUES = values_of(JETS, 6, seed=3)


@pytest.fixture
def jets() -> Collection:
    """Five rows, filled with the first ones of VALUES."""
    collection = Collection(JETS, 5, capacity=40)
    for member in JETS.columns:
        collection.fill(member.name, VALUES[member.name])
    return collection


def test_fill_takes_the_first_rows(jets: Collection) -> None:
    for member in JETS.columns:
        values = VALUES[member.name]
        expected = values if member.kind == "scalar" else values[:5]
        assert torch.equal(jets.tensor(member.name), expected)


def test_a_block_is_read_as_the_model_gets_it(jets: Collection) -> None:
    kinematics, mixed, cov, event = (read_block(bound, jets) for bound in SIGNATURE.inputs)
    assert torch.equal(kinematics, torch.stack([VALUES["eta"], VALUES["pt"]], 1)[:5])
    assert torch.equal(mixed, torch.stack([VALUES["q"].float(), VALUES["pt"]], 1)[:5])
    assert torch.equal(cov, VALUES["cov"][:5])
    assert np.array_equal(event.numpy(), VALUES["run"].reshape(1).numpy())
