"""What travels is what the columns hold, from either side, in every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings

from serving.errors import ServingError
from serving.wire import TRITON_DTYPES, Array, Wire, WireTensor, collection_parts, locations
from soa import Block, Collection, Layout, RowRange, Signature, column
from soa.arguments import argument_tensors
from tests.models.building import reference_collections
from tests.models.signatures import Problem, problems


def travels(signature: Signature) -> bool:
    return all(c.dtype in TRITON_DTYPES for la in signature.layouts.values() for c in la.columns)


def expected(t: WireTensor, problem: Problem, n: int) -> torch.Tensor:
    values = problem.inputs[t.collection][t.column.name]
    return values.reshape(1) if t.scalar else values[:n].reshape(t.shape(n))


@settings(max_examples=60)
@given(problems())
def test_both_sides_read_the_same_values(problem: Problem) -> None:
    signature, n = problem.signature, problem.n
    assume(travels(signature))
    given_, written = reference_collections(signature, problem.inputs, {"n": n}, problem.spare)
    wire = Wire.of(signature)
    arguments = argument_tensors(signature, {**given_, **written}, {"n": n})
    places = locations(signature, wire.inputs, "input")
    for t in wire.inputs:
        theirs = t.gather(places[t.name].parts(arguments), 0, n)
        ours = t.gather(collection_parts(given_[t.collection], t.column), 0, n)
        wanted = expected(t, problem, n).numpy()
        for found in (theirs, ours):
            assert (found.dtype, found.shape) == (t.dtype, t.shape(n))
            assert found.tobytes() == np.ascontiguousarray(wanted).tobytes()
            assert len(found.tobytes()) == t.nbytes(n)


@settings(max_examples=60)
@given(problems())
def test_an_answer_lands_in_its_columns_and_nowhere_else(problem: Problem) -> None:
    signature, n = problem.signature, problem.n
    assume(travels(signature))
    wire = Wire.of(signature)
    by_client, by_server = (
        reference_collections(signature, problem.inputs, {"n": n}, problem.spare) for _ in range(2)
    )
    arguments = argument_tensors(signature, {**by_client[0], **by_client[1]}, {"n": n})
    places = locations(signature, wire.outputs, "output")
    for i, t in enumerate(wire.outputs):
        values: Array = (np.arange(t.nbytes(n) // t.dtype.itemsize) % 90 + i).astype(t.dtype)
        values = values.reshape(t.shape(n))
        t.scatter(places[t.name].parts(arguments), 0, values)
        t.scatter(collection_parts(by_server[1][t.collection], t.column), 0, values)
    for name, collection in by_client[1].items():
        for mine, theirs in zip(collection.memory(), by_server[1][name].memory(), strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    for i, t in enumerate(wire.outputs):
        values = (np.arange(t.nbytes(n) // t.dtype.itemsize) % 90 + i).astype(t.dtype)
        found = t.gather(collection_parts(by_client[1][t.collection], t.column), 0, n)
        assert np.array_equal(found, values.reshape(t.shape(n)))
        rest = [
            by_client[1][t.collection].component(t.column.name, k)[n:]
            for k in range(t.column.components)
        ]
        assert not any(piece.any() for piece in rest)


def test_rows_in_the_middle() -> None:
    layout = Layout([column("a", "int32")])
    collection = Collection(layout, 10)
    t = WireTensor("c", layout["a"], "n")
    parts = collection_parts(collection, layout["a"])
    t.scatter(parts, 4, np.array([[7], [8]], np.int32))
    assert collection["a"].tolist() == [0, 0, 0, 0, 7, 8, 0, 0, 0, 0]
    assert t.gather(parts, 4, 2).tolist() == [[7], [8]]


def test_a_dtype_that_does_not_travel() -> None:
    signature = Signature.build(
        {"a": Layout([column("x", "bfloat16")]), "b": Layout([column("y", "float32")])},
        [Block("in", "a", ("x",))],
        [Block("out", "b", ("y",))],
        {"n": RowRange(0, 10)},
    )
    with pytest.raises(ServingError, match=r"column a\.x is bfloat16, which does not travel"):
        Wire.of(signature)
