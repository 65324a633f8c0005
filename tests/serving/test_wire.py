"""Requests and answers carry the columns' values, in both directions and every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serving.errors import ServingError
from serving.wire import FORMS, TRITON_DTYPES, Array, Form, Parts, Wire, WireTensor, locations
from soa import Block, Collection, Layout, RowRange, Signature, column, scalar
from soa.memory import argument_tensors
from stages.reference.answers import row_major_inputs
from tests.models import served
from tests.models.building import reference_collections
from tests.models.signatures import Problem, problems

forms = pytest.mark.parametrize("form", FORMS)


def wire_of(signature: Signature, form: Form) -> Wire:
    """The wire of a signature in this form; refusals are tested elsewhere."""
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
    """The columns themselves, one by one, in the wire's order and shape."""
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


def parts_of(
    signature: Signature, tensors: Sequence[WireTensor], role: str,
    collections: Mapping[str, Collection], n: int,
) -> dict[str, Parts]:  # fmt: skip
    """The parts of each tensor, as in a session that is bound to the collections."""
    arguments = argument_tensors(signature, collections, {"n": n})
    places = locations(signature, tensors, role)
    return {t.name: places[t.name].parts([a.numpy() for a in arguments]) for t in tensors}


@forms
@settings(max_examples=settings().max_examples * 2 // 5)
@given(data=st.data())
def test_what_travels_is_in_the_columns(data: st.DataObject, form: Form) -> None:
    problem = data.draw(problems_in(form))
    signature, n = problem.signature, problem.n
    wire = wire_of(signature, form)
    given_, written = reference_collections(signature, problem.inputs, {"n": n}, problem.spare)
    parts = parts_of(signature, wire.inputs, "input", {**given_, **written}, n)
    for t in wire.inputs:
        found, wanted = t.gather(parts[t.name], 0, n), expected(t, problem, n)
        view = t.window(parts[t.name], 0, n)
        if view is not None and n:  # a view of the columns
            assert np.shares_memory(view, found)
            assert view.tobytes() == wanted.tobytes()
        assert (found.dtype, found.shape) == (t.dtype, t.shape(n))
        assert found.tobytes() == wanted.tobytes()
        assert len(found.tobytes()) == t.nbytes(n)


@settings(max_examples=settings().max_examples * 2 // 5)
@given(problem=problems(one_dtype=True))
def test_rows_are_the_models_own_tensors(problem: Problem) -> None:
    """They are the tensors with which the model itself is called, before a cast of the block."""
    signature, n = problem.signature, problem.n
    wire = wire_of(signature, "rows")
    both = reference_collections(signature, problem.inputs, {"n": n}, problem.spare)
    parts = parts_of(signature, wire.inputs, "input", {**both[0], **both[1]}, n)
    ordinary = row_major_inputs(signature, problem.inputs, {"n": n})
    for t, bound, tensor in zip(wire.inputs, signature.inputs, ordinary, strict=True):
        assert t.name == bound.name
        found = torch.from_numpy(np.array(t.gather(parts[t.name], 0, n)))
        if bound.block.broadcast:  # a scalar is sent once
            found = found.expand(tensor.shape)
        assert torch.equal(found.to(tensor.dtype), tensor)


@forms
@settings(max_examples=settings().max_examples * 2 // 5)
@given(data=st.data())
def test_an_answer_lands_in_its_columns_and_nowhere_else(data: st.DataObject, form: Form) -> None:
    problem = data.draw(problems_in(form))
    signature, n = problem.signature, problem.n
    wire = wire_of(signature, form)
    given_, written = reference_collections(signature, problem.inputs, {"n": n}, problem.spare)
    parts = parts_of(signature, wire.outputs, "output", {**given_, **written}, n)
    sent: dict[str, Array] = {}
    for i, t in enumerate(wire.outputs):
        values: Array = (np.arange(t.nbytes(n) // t.dtype.itemsize) % 90 + i).astype(t.dtype)
        sent[t.name] = values.reshape(t.shape(n))
        t.scatter(parts[t.name], 0, sent[t.name])
    for t in wire.outputs:
        assert np.array_equal(t.gather(parts[t.name], 0, n), sent[t.name])
        by_row = sent[t.name] if t.rows_last else sent[t.name].reshape(-1, len(t.order)).T
        for entry, k in zip(by_row, t.order, strict=True):
            column = written[t.collection].span(*t.components[k]).tensor().numpy()
            assert np.array_equal(column[: len(entry)], entry)
            assert t.scalar or not column[n:].any()


def test_rows_in_the_middle() -> None:
    values = np.zeros(10, np.int32)
    t = WireTensor("c.a", "c", (("a", 0),), (0,), (1,), "int32", "n")
    t.scatter([values], 4, np.array([[7], [8]], np.int32))
    assert values.tolist() == [0, 0, 0, 0, 7, 8, 0, 0, 0, 0]
    assert t.gather([values], 4, 2).tolist() == [[7], [8]]


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
    with pytest.raises(ServingError, match=r"column a\.x is bfloat16, which cannot be sent"):
        Wire.of(signature)
    with pytest.raises(ServingError, match=r"column a\.x is bfloat16, which cannot be sent"):
        Wire.of(signature, "rows")
