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
def test_values_are_set_by_name(storage: Storage) -> None:
    made = Collection(Layout(MEMBERS, storage=storage), 3, capacity=5)
    made["x"] = [1, 2, 3]
    made["k"] = np.array([1.0, 2.0, -128.0])  # numbers that int8 has
    made["flag"] = torch.tensor([True, False, True])
    made["v"] = [5, 6]  # for each row
    made["m"] = np.arange(18).reshape(3, 2, 3)
    made["s"] = 7
    found = to_numpy(made)
    assert found["x"].tolist() == [1, 2, 3] and found["k"].tolist() == [1, 2, -128]
    assert found["flag"].tolist() == [True, False, True] and found["s"] == 7
    assert found["v"].tolist() == [[5, 6]] * 3
    assert found["m"].tolist() == np.arange(18.0).reshape(3, 2, 3).tolist()
    made["x"] = 4
    assert made.rows(5)["x"].tolist() == [4, 4, 4, 0, 0]


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
def test_what_does_not_fit_is_refused(name: str, values: Any) -> None:
    made = Collection(Layout(MEMBERS), 3)
    with pytest.raises(CollectionError, match=f"'{name}'"):
        made[name] = values
    assert not any(each.any() for each in to_numpy(made).values())


@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_a_component_is_numpy(storage: Storage) -> None:
    made = Collection(Layout(MEMBERS, storage=storage), 3, capacity=5)
    made["v"] = [5, 6]
    part = made.component("v", 1)
    assert isinstance(part, np.ndarray) and part.tolist() == [6, 6, 6, 0, 0]
    part[0] = 9
    assert to_numpy(made)["v"].tolist() == [[5, 9], [5, 6], [5, 6]]
    assert not made.locked().component("v").flags.writeable
    with pytest.raises(CollectionError, match="read-only"):
        made.locked()["x"] = 1


def test_a_session_is_closed_at_the_end_of_its_block() -> None:
    with Session(building.mlp_signature(), rogues.honest()) as session:
        assert not session.closed
    assert session.closed


def test_a_session_and_a_signature_are_tables_in_a_notebook() -> None:
    signature = Signature.build(
        {"given": Layout(MEMBERS), "found": Layout([column("y", "float32")])},
        [Block("a", "given", ("x",))],
        [Block("b", "found", ("y",))],
        {"n": RowRange(0, 64)},
    )
    for shown in (signature, Session(signature, rogues.honest())):
        table = shown._repr_html_()
        for word in ("given", "found", "x float32", "m float64[2, 3]", "0 to 64"):
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
