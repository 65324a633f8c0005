"""An artifact's arguments are views of the collections, with the right shapes and addresses."""

from __future__ import annotations

import numpy as np
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


def test_arguments_are_views() -> None:
    jets, tags = Collection(JETS, 33, capacity=40), Collection(TAGS, 33, capacity=40)
    found = argument_tensors(SIGNATURE, {"jets": jets, "tags": tags}, {"n": 33})
    # capacity 40: 160 -> 256 bytes, 64 floats a column
    shapes = [(33, 0), (2, 64), (33,), (33,), (6, 64), (1,), (33,), (33,)]
    assert [tuple(t.shape) for t in found] == shapes
    assert all(t.is_contiguous() for t in found)
    # pt 0, eta 256, q 512 (40 -> 128), cov 640, run 640 + 6 * 256 = 2176
    assert [t.data_ptr() - jets.data_ptr for t in found[1:6]] == [0, 512, 0, 640, 2176]
    assert [t.data_ptr() for t in found[6:]] == [tags.span(name).address for name in "bc"]


def test_a_carrier_has_rows_and_no_memory() -> None:
    assert carrier(5).shape == (5, 0)
    assert carrier(0).nbytes == carrier(5).nbytes == 0


def test_values_in_and_blocks_out() -> None:
    values = values_of(JETS, 6, seed=3)
    jets = Collection(JETS, 5, capacity=40)
    for member in JETS.columns:
        jets.fill(member.name, values[member.name])  # without the sixth row
        expected = values[member.name]
        expected = expected if member.kind == "scalar" else expected[:5]
        assert torch.equal(jets.tensor(member.name), expected)
    kinematics, mixed, cov, event = (read_block(bound, jets) for bound in SIGNATURE.inputs)
    assert torch.equal(kinematics, torch.stack([values["eta"], values["pt"]], 1)[:5])
    assert torch.equal(mixed, torch.stack([values["q"].float(), values["pt"]], 1)[:5])
    assert torch.equal(cov, values["cov"][:5])
    assert np.array_equal(event.numpy(), values["run"].reshape(1).numpy())
