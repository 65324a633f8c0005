"""What travels is what the columns hold, from either side, in every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serving.errors import ServingError
from serving.wire import (
    FORMS,
    TRITON_DTYPES,
    Array,
    Form,
    Wire,
    WireTensor,
    collection_parts,
    locations,
)
from soa import Block, Collection, Layout, RowRange, Signature, column, scalar
from soa.memory import argument_tensors
from stages.reference.answers import row_major_inputs
from tests.models import served
from tests.models.building import reference_collections
from tests.models.signatures import Problem, problems

forms = pytest.mark.parametrize("form", FORMS)


def wire_of(signature: Signature, form: Form) -> Wire:
    """Of a signature that travels in that form; what is refused has tests of its own."""
    dtypes = {c.dtype for layout in signature.layouts.values() for c in layout.columns}
    assume(dtypes <= set(TRITON_DTYPES))
    try:
        return Wire.of(signature, form)
    except ServingError:
        assume(form == "columns")
        raise


def problems_in(form: Form) -> st.SearchStrategy[Problem]:
    return problems(one_dtype=form != "columns")


def expected(t: WireTensor, problem: Problem, n: int) -> Array:
    """Entry by entry: the columns themselves, in the wire's order and shape."""
    layout = problem.signature.layouts[t.collection]
    entries = []
    for place in t.order:
        name, k = t.components[place]
        values = problem.inputs[t.collection][name]
        member = layout[name]
        if member.kind == "eigen":
            index = [member.component_of(i) for i in range(member.components)].index(k)
            values = values.reshape(len(values), -1)[:, index]
        entries.append(values.reshape(1) if t.scalar else values[:n])
    if t.scalar or t.rows_last:
        stacked = np.stack([entry.numpy() for entry in entries])
    else:
        stacked = np.stack([entry.numpy() for entry in entries], axis=1)
    return stacked.reshape(t.shape(n))


@forms
@settings(max_examples=40)
@given(data=st.data())
def test_both_sides_read_the_same_values(data: st.DataObject, form: Form) -> None:
    problem = data.draw(problems_in(form))
    signature, n = problem.signature, problem.n
    wire = wire_of(signature, form)
    given_, written = reference_collections(signature, problem.inputs, {"n": n}, problem.spare)
    arguments = argument_tensors(signature, {**given_, **written}, {"n": n})
    places = locations(signature, wire.inputs, "input")
    for t in wire.inputs:
        theirs = t.gather(places[t.name].parts(arguments), 0, n)
        ours = t.gather(collection_parts(given_[t.collection], t), 0, n)
        wanted = expected(t, problem, n)
        view = t.window(collection_parts(given_[t.collection], t), 0, n)
        if view is not None and n:  # what is written there is in the columns
            assert np.shares_memory(view, ours)
            assert view.tobytes() == wanted.tobytes()
        for found in (theirs, ours):
            assert (found.dtype, found.shape) == (t.dtype, t.shape(n))
            assert found.tobytes() == wanted.tobytes()
            assert len(found.tobytes()) == t.nbytes(n)


@settings(max_examples=40)
@given(problem=problems(one_dtype=True))
def test_rows_are_the_models_own_tensors(problem: Problem) -> None:
    """As an ordinary user of the model would make them, up to a cast that the block asks for."""
    signature, n = problem.signature, problem.n
    wire = wire_of(signature, "rows")
    given_, _ = reference_collections(signature, problem.inputs, {"n": n}, problem.spare)
    ordinary = row_major_inputs(signature, problem.inputs, {"n": n})
    for t, bound, tensor in zip(wire.inputs, signature.inputs, ordinary, strict=True):
        assert t.name == bound.name
        found = torch.from_numpy(
            np.array(t.gather(collection_parts(given_[t.collection], t), 0, n))
        )
        assert torch.equal(found.to(tensor.dtype), tensor)


@forms
@settings(max_examples=40)
@given(data=st.data())
def test_an_answer_lands_in_its_columns_and_nowhere_else(data: st.DataObject, form: Form) -> None:
    problem = data.draw(problems_in(form))
    signature, n = problem.signature, problem.n
    wire = wire_of(signature, form)
    by_client, by_server = (
        reference_collections(signature, problem.inputs, {"n": n}, problem.spare) for _ in range(2)
    )
    arguments = argument_tensors(signature, {**by_client[0], **by_client[1]}, {"n": n})
    places = locations(signature, wire.outputs, "output")
    for i, t in enumerate(wire.outputs):
        values: Array = (np.arange(t.nbytes(n) // t.dtype.itemsize) % 90 + i).astype(t.dtype)
        values = values.reshape(t.shape(n))
        t.scatter(places[t.name].parts(arguments), 0, values)
        t.scatter(collection_parts(by_server[1][t.collection], t), 0, values)
    for name, collection in by_client[1].items():
        for mine, theirs in zip(collection.memory(), by_server[1][name].memory(), strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    for i, t in enumerate(wire.outputs):
        values = (np.arange(t.nbytes(n) // t.dtype.itemsize) % 90 + i).astype(t.dtype)
        found = t.gather(collection_parts(by_client[1][t.collection], t), 0, n)
        assert np.array_equal(found, values.reshape(t.shape(n)))
        rest = [by_client[1][t.collection].component(name, k)[n:] for name, k in t.components]
        assert t.scalar or not any(piece.any() for piece in rest)


def test_rows_in_the_middle() -> None:
    layout = Layout([column("a", "int32")])
    collection = Collection(layout, 10)
    t = WireTensor("c.a", "c", (("a", 0),), (0,), (1,), "int32", "n")
    parts = collection_parts(collection, t)
    t.scatter(parts, 4, np.array([[7], [8]], np.int32))
    assert collection.tensor("a").tolist() == [0, 0, 0, 0, 7, 8, 0, 0, 0, 0]
    assert t.gather(parts, 4, 2).tolist() == [[7], [8]]


@forms
def test_the_shapes_of_each_form(form: Form) -> None:
    wire = Wire.of(served.EVENT, form)
    shapes = {t.name: t.described for t in (*wire.inputs, *wire.outputs)}
    assert shapes == {
        "columns": {
            "nodes.x": "(nodes, 1)", "nodes.y": "(nodes, 1)", "nodes.z": "(1,)",
            "edges.weight": "(edges, 1)", "out.score": "(nodes, 1)", "out.total": "(1,)",
        },
        "rows": {
            "points": "(nodes, 2)", "scale": "(1,)", "weights": "(edges, 1)",
            "score": "(nodes, 1)", "total": "(1,)",
        },
        "blocks": {
            "points": "(2, nodes)", "scale": "(1,)", "weights": "(1, edges)",
            "score": "(1, nodes)", "total": "(1,)",
        },
    }[form]  # fmt: skip


@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_a_block_that_one_tensor_does_not_carry(form: Form) -> None:
    with pytest.raises(ServingError, match=r"block 'plain' has columns of float16, float32, int8"):
        Wire.of(served.MIXED, form)
    twice = Signature.build(
        {
            "a": Layout([column("x", "float32"), column("y", "float32"), scalar("z", "float32")]),
            "b": Layout([column("w", "float32")]),
        },
        [Block("one", "a", ("x", "y")), Block("two", "a", ("y",))],
        [Block("out", "b", ("w",))],
        {"n": RowRange(0, 10)},
    )
    with pytest.raises(ServingError, match=r"column a\.y is in the blocks 'one' and 'two'"):
        Wire.of(twice, form)


def test_a_dtype_that_does_not_travel() -> None:
    signature = Signature.build(
        {"a": Layout([column("x", "bfloat16")]), "b": Layout([column("y", "float32")])},
        [Block("in", "a", ("x",))],
        [Block("out", "b", ("y",))],
        {"n": RowRange(0, 10)},
    )
    with pytest.raises(ServingError, match=r"column a\.x is bfloat16, which does not travel"):
        Wire.of(signature)
    with pytest.raises(ServingError, match=r"column a\.x is bfloat16, which does not travel"):
        Wire.of(signature, "rows")
