"""Signatures: their refusals, the order of arguments, and that they are read back unchanged."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from soa.block import Block
from soa.dtypes import is_float
from soa.errors import BlockError, SignatureError
from soa.layout import Column, Layout, column, eigen, scalar
from soa.signature import RowRange, Signature, offsets_layout
from tests.soa.strategies import layouts

JETS = Layout(
    [
        column("pt", "float32"),
        column("eta", "float32"),
        column("q", "int8"),
        eigen("cov", "float32", 2, 2),
        scalar("run", "uint32"),
    ]
)
TAGS = Layout([column("b", "float32"), column("c", "float32"), column("n", "int32")])
LAYOUTS = {"jets": JETS, "tags": TAGS}
MESONS = Layout([Column("µ", "float32")])
RANGES = {"n": RowRange(0, 100, (10,))}
KINEMATICS = Block("kinematics", "jets", ("eta", "pt"))
SCORES = Block("scores", "tags", ("b", "c"))


def build(
    inputs: list[Block] | None = None, outputs: list[Block] | None = None, **changes: Any
) -> Signature:
    """A sound signature of jets and tags, with changes by argument."""
    arguments: dict[str, Any] = {"layouts": LAYOUTS, "ranges": RANGES, **changes}
    return Signature.build(
        inputs=[KINEMATICS] if inputs is None else inputs,
        outputs=[SCORES] if outputs is None else outputs,
        **arguments,
    )


def test_arguments_are_carriers_inputs_and_outputs_in_order() -> None:
    signature = build(
        [
            KINEMATICS,
            Block("mixed", "jets", ("q", "pt"), "float32"),
            Block("event", "jets", ("run",)),
            Block("cov", "jets", ("cov",)),
        ],
        [SCORES],
    )
    facts = [
        (a.role, a.kind, a.block, a.column, a.component, a.dtype, a.count)
        for a in signature.arguments
    ]
    assert facts == [
        ("carrier", "carrier", "", "", 0, "float32", 1),
        ("input", "matrix", "kinematics", "pt", 0, "float32", 2),
        ("input", "column", "mixed", "q", 0, "int8", 1),
        ("input", "column", "mixed", "pt", 0, "float32", 1),
        ("input", "scalar", "event", "run", 0, "uint32", 1),
        ("input", "matrix", "cov", "cov", 0, "float32", 4),
        ("output", "matrix", "scores", "b", 0, "float32", 2),
    ]


def test_collections_are_those_of_inputs_and_those_of_outputs_each_once() -> None:
    event = Block("event", "jets", ("run",))
    signature = build([KINEMATICS, Block("mixed", "jets", ("q", "pt"), "float32"), event])
    assert signature.input_collections == ("jets",)
    assert signature.output_collections == ("tags",)


def test_one_carrier_for_each_row_dimension_in_order_of_use() -> None:
    signature = build(
        ranges={"jet": RowRange(0, 10), "tag": RowRange(0, 20)},
        rows_of={"tags": "tag", "jets": "jet"},
    )
    assert signature.dims == ("jet", "tag")
    assert [a.rows for a in signature.arguments] == ["jet", "tag", "jet", "tag"]


def test_the_shapes_that_a_model_sees() -> None:
    signature = build([KINEMATICS, Block("cov", "jets", ("cov",)), Block("run", "jets", ("run",))])
    assert [bound.shape(7) for bound in signature.inputs] == [(7, 2), (7, 2, 2), (1,)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"inputs": []}, "at least one input and one output block"),
        ({"outputs": []}, "at least one input and one output block"),
        ({"inputs": [KINEMATICS, KINEMATICS]}, "two blocks are called 'kinematics'"),
        ({"inputs": [Block("x", "tracks", ("pt",))]}, "block 'x': no collection 'tracks', there"),
        ({"outputs": [Block("x", "jets", ("pt",))]}, "'pt' of 'jets' is an input and an output"),
        ({"outputs": [SCORES, Block("x", "tags", ("c",))]}, "is written by 'scores' and 'x'"),
        ({"outputs": [Block("x", "jets", ("run",), broadcast=True)]}, "output 'x' has broadcast"),
        ({"ranges": {}}, "collection 'jets': no range for its rows 'n'"),
        ({"rows_of": {"jest": "n"}}, "rows of 'jest', which is no collection"),
        ({"layouts": {**LAYOUTS, "spare": TAGS}}, "collection 'spare' has no block"),
        ({"layouts": {**LAYOUTS, "my jets": JETS}}, "collection 'my jets' is not an identifier"),
        ({"layouts": {**LAYOUTS, "more": MESONS}}, "column 'µ' is not an identifier"),
        ({"inputs": [Block("x-y", "jets", ("pt",))]}, "block 'x-y' is not an identifier"),
        ({"ranges": {**RANGES, "n/2": RANGES["n"]}}, "row dimension 'n/2' is not an identifier"),
    ],
)
def test_signatures_that_contradict_themselves_are_refused(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(SignatureError, match=says):
        build(**changes)


def test_a_block_with_an_unknown_column_is_named() -> None:
    with pytest.raises(BlockError, match="block 'x', collection 'jets': no column 'phi'"):
        build([Block("x", "jets", ("phi",))])


def test_an_output_block_of_several_dtypes_is_refused() -> None:
    mixed = Block("mixed", "tags", ("b", "n"), "float32")
    with pytest.raises(BlockError, match="output block 'mixed' has columns of float32, int32"):
        build(outputs=[mixed])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RowRange(5, 4), "rows from 5 to 4 is not a range"),
        (lambda: RowRange(-1, 4), "rows from -1 to 4 is not a range"),
        (lambda: RowRange(0, 1), "rows up to 1: .* at least 2"),
        (lambda: RowRange(1, 8, (4, 9)), "typical n 9 lies outside 1 … 8"),
    ],
)
def test_ranges_that_cannot_be_are_refused(make: Any, says: str) -> None:
    with pytest.raises(SignatureError, match=says):
        make()


# -- stored and read back ------------------------------------------------------------------------


def stored(signature: Signature) -> dict[str, Any]:
    """The signature as JSON keeps it."""
    data: dict[str, Any] = json.loads(json.dumps(signature.to_dict()))
    return data


@given(layouts(storages=("buffer", "columns")), layouts(storages=("buffer", "columns")), st.data())
def test_any_signature_reads_back(source: Layout, sink: Layout, data: st.DataObject) -> None:
    def pick(layout: Layout, name: str, collection: str, outputs: bool) -> Block:
        scalars = data.draw(st.booleans())
        fit = [c for c in layout.columns if (c.kind == "scalar") == scalars]
        if outputs:
            floats = data.draw(st.booleans())
            fit = [c for c in fit if is_float(c.dtype) == floats]
            if not floats:  # integers of one dtype: no type holds all mixed ones
                fit = [c for c in fit if c.dtype == fit[0].dtype]
        assume(fit)
        picked = data.draw(st.permutations(fit))[: data.draw(st.integers(1, len(fit)))]
        return Block(name, collection, tuple(c.name for c in picked), "float32")

    inputs = [pick(source, f"in{i}", "source", False) for i in range(data.draw(st.integers(1, 3)))]
    signature = Signature.build(
        {"source": source, "sink": sink},
        inputs,
        [pick(sink, "out", "sink", True)],
        {"n": RowRange(0, 64, (1, 10)), "m": RowRange(1, 8)},
        {"sink": data.draw(st.sampled_from(["n", "m"]))},
    )
    again = Signature.from_dict(stored(signature))
    assert again == signature and again.to_dict() == signature.to_dict()


def test_a_signature_that_was_stored_with_other_names_reads_back() -> None:
    text = json.dumps(build().to_dict()).replace('"pt"', '"µ"').replace("kinematics", "p-T")
    old = Signature.from_dict(json.loads(text))
    assert old.inputs[0].name == "p-T" and old.layouts["jets"].columns[0].name == "µ"


@pytest.mark.parametrize(
    "alter",
    [
        lambda d: d["inputs"][0]["plan"].update(order=[0, 1]),
        lambda d: d["inputs"][0]["plan"].update(kind="columns"),
        lambda d: d["outputs"][0]["plan"]["components"].reverse(),
        lambda d: d.update(extra=1),
    ],
)
def test_an_altered_signature_is_refused(alter: Any) -> None:
    data = copy.deepcopy(stored(build()))
    alter(data)
    with pytest.raises(SignatureError, match="does not follow from its own layouts"):
        Signature.from_dict(data)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {**stored(build()), "rows": None},
        {**stored(build()), "rows": {"n": {"min": 0.5, "max": 9, "typical": []}}},
        {**stored(build()), "inputs": [{**stored(build())["inputs"][0], "name": None}]},
    ],
)
def test_what_is_no_stored_signature_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(SignatureError, match="not a stored signature"):
        Signature.from_dict(data)


JAGGED: dict[str, Any] = {
    "layouts": {"jets": JETS, "tags": TAGS, "jets_offsets": offsets_layout("int32")},
    "inputs": [KINEMATICS, Block("offsets", "jets_offsets", ("begin", "end"))],
    "ranges": {"n": RowRange(0, 100), "jet": RowRange(0, 1000)},
    "rows_of": {"jets": "jet"},
    "jagged": {"jets": 16},
}


def test_a_jagged_collection_reads_back() -> None:
    signature = build(**JAGGED)
    data = stored(signature)
    assert Signature.from_dict(data) == signature
    assert data["jagged"] == {"jets": 16}


def test_a_signature_without_jagged_collections_does_not_mention_them() -> None:
    assert "jagged" not in build().to_dict()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rows_of": {}}, "'jets' needs 'jets_offsets', of another row dim"),
        ({"jagged": {"tags": 16}}, "'tags' needs 'tags_offsets'"),
    ],
    ids=["offsets of the same rows", "no offsets"],
)
def test_a_jagged_collection_needs_its_offsets(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SignatureError, match=says):
        build(**JAGGED | changes)
