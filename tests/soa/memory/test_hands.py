"""What is written by hand in a notebook: `collection[name] = values`, `component`, tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import torch

from registry.version import Version
from runtime.session import Session
from soa import Block, Collection, Layout, RowRange, Signature, column, eigen, scalar
from soa.errors import CollectionError
from soa.layout import Storage
from soa.memory import to_numpy
from tests.models import building, rogues

MEMBERS = [
    column("x", "float32"),
    column("k", "int8"),
    column("flag", "bool"),
    eigen("v", "float32", 2),
    eigen("m", "float64", 2, 3),
    scalar("s", "float32"),
]


@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_values_of_any_library_are_set_by_name(storage: Storage) -> None:
    collection = Collection(Layout(MEMBERS, storage=storage), 3, capacity=5)
    collection["x"] = [1, 2, 3]
    collection["k"] = np.array([1.0, 2.0, -128.0])  # numbers that int8 has
    collection["flag"] = torch.tensor([True, False, True])
    collection["m"] = np.arange(18).reshape(3, 2, 3)
    collection["s"] = 7
    values = to_numpy(collection)
    assert values["x"].tolist() == [1, 2, 3] and values["k"].tolist() == [1, 2, -128]
    assert values["flag"].tolist() == [True, False, True] and values["s"] == 7
    assert values["m"].tolist() == np.arange(18.0).reshape(3, 2, 3).tolist()


@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_one_value_is_set_for_each_row_in_use(storage: Storage) -> None:
    collection = Collection(Layout(MEMBERS, storage=storage), 3, capacity=5)
    collection["v"] = [5, 6]
    collection["x"] = 4
    assert to_numpy(collection)["v"].tolist() == [[5, 6]] * 3
    assert collection.rows(5)["x"].tolist() == [4, 4, 4, 0, 0]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("x", [1, 2]),
        ("x", "text"),
        ("k", [1, 2, 0.5]),
        ("k", torch.tensor([1, 2, 300])),
        ("k", [1, 2, float("nan")]),
        ("flag", [0, 1, 2]),
        ("s", [1, 2]),
    ],
)
def test_values_that_do_not_fit_are_refused_and_nothing_is_written(name: str, values: Any) -> None:
    collection = Collection(Layout(MEMBERS), 3)
    with pytest.raises(CollectionError, match=f"'{name}'"):
        collection[name] = values
    assert not any(array.any() for array in to_numpy(collection).values())


@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_a_component_is_an_array_of_numpy_over_its_memory(storage: Storage) -> None:
    collection = Collection(Layout(MEMBERS, storage=storage), 3, capacity=5)
    collection["v"] = [5, 6]
    second = collection.component("v", 1)
    assert isinstance(second, np.ndarray) and second.tolist() == [6, 6, 6, 0, 0]
    second[0] = 9
    assert to_numpy(collection)["v"].tolist() == [[5, 9], [5, 6], [5, 6]]


@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_a_locked_collection_is_not_written_by_hand(storage: Storage) -> None:
    locked = Collection(Layout(MEMBERS, storage=storage), 3).locked()
    assert not locked.component("v").flags.writeable
    with pytest.raises(CollectionError, match="read-only"):
        locked["x"] = 1


def test_a_session_is_closed_at_the_end_of_its_block() -> None:
    with Session(building.mlp_signature(), rogues.honest()) as session:
        assert not session.closed
    assert session.closed


@pytest.mark.parametrize("opened", [False, True], ids=["signature", "session"])
def test_a_session_and_a_signature_are_tables_in_a_notebook(opened: bool) -> None:
    signature = Signature.build(
        {"hits": Layout(MEMBERS), "scores": Layout([column("y", "float32")])},
        [Block("a", "hits", ("x",))],
        [Block("b", "scores", ("y",))],
        {"n": RowRange(0, 64)},
    )
    shown: Session | Signature = Session(signature, rogues.honest()) if opened else signature
    table = shown._repr_html_()
    for word in ("hits", "scores", "x float32", "m float64[2, 3]", "0 to 64"):
        assert word in table


def test_a_version_is_a_table_whose_text_is_escaped() -> None:
    version = Version(
        "jets", 3, "ab" * 32, ("production",), {"cpu/x86-64-v3": "<b>verified</b>"},
        {"cpu/x86-64-v3": "lanes"}, {}, datetime.now(UTC), None, "file:///bundle", {},
    )  # fmt: skip
    table = version._repr_html_()
    for word in ("jets/3", "@production", "lanes", "&lt;b&gt;verified"):
        assert word in table
    assert "<b>" not in table
