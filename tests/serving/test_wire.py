"""Requests and answers carry the columns' values, in both directions and every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serving.errors import ServingError
from serving.wire import FORMS, TRITON_DTYPES, Array, Form, Parts, Wire, WireTensor, locate_columns
from soa import Block, Collection, Layout, RowRange, Signature, column, scalar
from soa.memory import argument_tensors
from stages.reference.answers import row_major_inputs
from tests.models import served
from tests.models.building import reference_collections
from tests.models.signatures import Problem, problems

forms = pytest.mark.parametrize("form", FORMS)


def wire_of(signature: Signature, form: Form) -> Wire:
    """The wire of a signature in this form; refusals are tested elsewhere."""
    dtypes = {column.dtype for layout in signature.layouts.values() for column in layout.columns}
    assume(dtypes <= set(TRITON_DTYPES))
    try:
        return Wire.of(signature, form)
    except ServingError:
        assume(form == "columns")
        raise


def problems_in(form: Form) -> st.SearchStrategy[Problem]:
    return problems(one_dtype=form != "columns")


def expected(tensor: WireTensor, problem: Problem, n: int) -> Array:
    """The columns themselves, one by one, in the wire's order and shape."""
    layout = problem.signature.layouts[tensor.collection]
    entries = []
    for place in tensor.order:
        name, k = tensor.components[place]
        values = problem.inputs[tensor.collection][name]
        member = layout[name]
        if member.kind == "eigen":
            index = [member.component_of(i) for i in range(member.components)].index(k)
            values = values.reshape(len(values), -1)[:, index]
        entries.append(values.reshape(1) if tensor.scalar else values[:n])
    if tensor.scalar or tensor.rows_last:
        stacked = np.stack([entry.numpy() for entry in entries])
    else:
        stacked = np.stack([entry.numpy() for entry in entries], axis=1)
    return stacked.reshape(tensor.shape(n))


def parts_of(
    signature: Signature, tensors: Sequence[WireTensor], role: str,
    collections: Mapping[str, Collection], n: int,
) -> dict[str, Parts]:  # fmt: skip
    """The parts of each tensor, as in a session that is bound to the collections."""
    arguments = argument_tensors(signature, collections, {"n": n})
    places = locate_columns(signature, tensors, role)
    arrays = [argument.numpy() for argument in arguments]
    return {tensor.name: places[tensor.name].parts(arrays) for tensor in tensors}


@forms
@settings(max_examples=settings().max_examples * 2 // 5)
@given(data=st.data())
def test_a_request_has_the_values_of_the_columns(data: st.DataObject, form: Form) -> None:
    problem = data.draw(problems_in(form))
    signature, n = problem.signature, problem.n
    wire = wire_of(signature, form)
    inputs, outputs = reference_collections(signature, problem.inputs, {"n": n}, problem.spare)
    parts = parts_of(signature, wire.inputs, "input", {**inputs, **outputs}, n)
    for tensor in wire.inputs:
        sent, wanted = tensor.gather(parts[tensor.name], 0, n), expected(tensor, problem, n)
        view = tensor.window(parts[tensor.name], 0, n)
        if view is not None and n:  # a view of the columns
            assert np.shares_memory(view, sent)
            assert view.tobytes() == wanted.tobytes()
        assert (sent.dtype, sent.shape) == (tensor.dtype, tensor.shape(n))
        assert sent.tobytes() == wanted.tobytes()
        assert len(sent.tobytes()) == tensor.nbytes(n)


@settings(max_examples=settings().max_examples * 2 // 5)
@given(problem=problems(one_dtype=True))
def test_rows_are_the_models_own_tensors(problem: Problem) -> None:
    """They are the tensors with which the model itself is called, before a cast of the block."""
    signature, n = problem.signature, problem.n
    wire = wire_of(signature, "rows")
    inputs, outputs = reference_collections(signature, problem.inputs, {"n": n}, problem.spare)
    parts = parts_of(signature, wire.inputs, "input", {**inputs, **outputs}, n)
    arguments = row_major_inputs(signature, problem.inputs, {"n": n})
    for tensor, bound, argument in zip(wire.inputs, signature.inputs, arguments, strict=True):
        assert tensor.name == bound.name
        sent = torch.from_numpy(np.array(tensor.gather(parts[tensor.name], 0, n)))
        if bound.block.broadcast:  # a scalar is sent once
            sent = sent.expand(argument.shape)
        assert torch.equal(sent.to(argument.dtype), argument)


@forms
@settings(max_examples=settings().max_examples * 2 // 5)
@given(data=st.data())
def test_an_answer_lands_in_its_columns_and_nowhere_else(data: st.DataObject, form: Form) -> None:
    problem = data.draw(problems_in(form))
    signature, n = problem.signature, problem.n
    wire = wire_of(signature, form)
    inputs, outputs = reference_collections(signature, problem.inputs, {"n": n}, problem.spare)
    parts = parts_of(signature, wire.outputs, "output", {**inputs, **outputs}, n)
    sent: dict[str, Array] = {}
    for i, tensor in enumerate(wire.outputs):
        count = tensor.nbytes(n) // tensor.dtype.itemsize
        values: Array = (np.arange(count) % 90 + i).astype(tensor.dtype)  # 90 fits into an int8
        sent[tensor.name] = values.reshape(tensor.shape(n))
        tensor.scatter(parts[tensor.name], 0, sent[tensor.name])
    for tensor in wire.outputs:
        values = sent[tensor.name]
        assert np.array_equal(tensor.gather(parts[tensor.name], 0, n), values)
        by_column = values if tensor.rows_last else values.reshape(-1, len(tensor.order)).T
        for entry, k in zip(by_column, tensor.order, strict=True):
            column = outputs[tensor.collection].span(*tensor.components[k]).tensor().numpy()
            assert np.array_equal(column[: len(entry)], entry)
            assert tensor.scalar or not column[n:].any()


def test_rows_in_the_middle_are_written_and_read() -> None:
    values = np.zeros(10, np.int32)
    tensor = WireTensor("c.a", "c", (("a", 0),), (0,), (1,), "int32", "n")
    tensor.scatter([values], 4, np.array([[7], [8]], np.int32))
    assert values.tolist() == [0, 0, 0, 0, 7, 8, 0, 0, 0, 0]
    assert tensor.gather([values], 4, 2).tolist() == [[7], [8]]


SHAPES: dict[Form, dict[str, str]] = {
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
}  # fmt: skip


@forms
def test_each_form_has_its_shapes(form: Form) -> None:
    wire = Wire.of(served.EVENT, form)
    shapes = {tensor.name: tensor.described for tensor in (*wire.inputs, *wire.outputs)}
    assert shapes == SHAPES[form]


@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_a_block_of_several_dtypes_is_refused(form: Form) -> None:
    with pytest.raises(ServingError, match=r"block 'plain' has columns of float16, float32, int8"):
        Wire.of(served.MIXED, form)


@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_a_column_of_two_blocks_is_refused(form: Form) -> None:
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


@pytest.mark.parametrize("form", ["columns", "rows"])
def test_a_dtype_that_cannot_be_sent_is_refused(form: Form) -> None:
    signature = Signature.build(
        {"a": Layout([column("x", "bfloat16")]), "b": Layout([column("y", "float32")])},
        [Block("in", "a", ("x",))],
        [Block("out", "b", ("y",))],
        {"n": RowRange(0, 10)},
    )
    with pytest.raises(ServingError, match=r"column a\.x is bfloat16, which cannot be sent"):
        Wire.of(signature, form)
