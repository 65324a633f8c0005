"""Reference inputs and answers: sizes, values, and inputs that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from soa import Block, Layout, RowRange, Signature, column, eigen, scalar
from stages.errors import CaptureError, ReferenceDataError
from stages.reference.answers import (
    Reference,
    check_inputs,
    compute_reference,
    make_cases,
    random_inputs,
    row_major_inputs,
)
from stages.reference.nonfinite import label
from tests.models import detector
from tests.models.building import mlp_signature, signature_of
from tests.models.rogues import Triple

HITS = Layout(
    [
        column("x", "float32"),
        column("flag", "bool"),
        column("charge", "int8"),
        eigen("cov", "float32", 2, 3),
        scalar("run", "uint32"),
    ]
)
SIGNATURE = Signature.build(
    {"hits": HITS, "out": Layout([column("y", "float32")])},
    [Block("features", "hits", ("x",)), Block("cov", "hits", ("cov",))],
    [Block("answers", "out", ("y",))],
    {"n": RowRange(0, 10)},
)


# -- cases -----------------------------------------------------------------------------------------


def test_sizes_surround_every_alignment() -> None:
    # 128 bytes hold 32 float32 and 128 int8; 2000 lies above the largest.
    signature = signature_of({"x": "a", "w": "b:int8"}, {"z": "y"}, RowRange(1, 500, (10, 300)))
    sizes = [case["n"] for case in make_cases(signature)]
    assert sizes == [1, 2, 10, 31, 32, 33, 37, 127, 128, 129, 300, 500]


def test_sizes_of_several_dimensions_run_side_by_side() -> None:
    cases = make_cases(detector.signature())
    by_n, by_m = [case["n"] for case in cases], [case["m"] for case in cases]
    assert {0, 1, 2, 31, 32, 33, 100} <= set(by_n)
    assert {0, 1, 2, 5, 31, 32, 33, 64, 70} <= set(by_m)
    assert any(n != m for n, m in zip(by_n, by_m, strict=True))


def test_the_label_of_a_case_names_each_dimension() -> None:
    assert label({"n": 5, "m": 20}) == "n=5,m=20"


def test_the_largest_sizes_meet_and_each_dimension_is_least_alone() -> None:
    out = Layout([column("y", "float32")])
    signature = Signature.build(
        {"i": HITS, "j": out, "o": Layout([column("z", "float32")])},
        [Block("x", "i", ("x",)), Block("w", "j", ("y",))],
        [Block("v", "o", ("z",))],
        {"n": RowRange(0, 1000, (300,)), "m": RowRange(1, 4000)},
        {"i": "n", "j": "m", "o": "m"},
    )
    cases = make_cases(signature)
    for n, m in ((1000, 4000), (0, 4000), (1000, 1)):
        assert cases.count({"n": n, "m": m}) == 1


# -- inputs ----------------------------------------------------------------------------------------


def test_random_inputs_follow_the_layout() -> None:
    inputs = random_inputs(SIGNATURE, 1, {})
    assert set(inputs) == {"hits"}
    shapes = {name: tuple(value.shape) for name, value in inputs["hits"].items()}
    assert shapes == {"x": (10,), "flag": (10,), "charge": (10,), "cov": (10, 2, 3), "run": ()}
    assert inputs["hits"]["run"].dtype == torch.uint32


def test_random_inputs_follow_the_seed() -> None:
    first, again, other = (random_inputs(SIGNATURE, seed, {})["hits"] for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["x"], other["x"])


def test_ranges_bound_the_values() -> None:
    signature = mlp_signature(1000)
    inputs = random_inputs(signature, 3, {"a": (20.0, 500.0)})["jets"]
    assert inputs["a"].dtype == torch.float32
    assert 20 <= inputs["a"].min() < 50
    assert 450 < inputs["a"].max() <= 500
    assert inputs["b"].min() < -1


def good() -> dict[str, dict[str, Any]]:
    """A user's own inputs; `x` has two rows more than are needed."""
    return {
        "hits": {
            "x": np.arange(12, dtype=np.float32),
            "flag": np.zeros(10, dtype=bool),
            "charge": torch.ones(10, dtype=torch.int8),
            "cov": np.zeros((10, 2, 3), dtype=np.float32),
            "run": np.uint32(7),
        }
    }


def test_a_users_own_inputs_are_taken_and_cut() -> None:
    checked = check_inputs(SIGNATURE, good())["hits"]
    assert checked["x"].tolist() == list(range(10))
    assert checked["run"].dtype == torch.uint32
    assert int(checked["run"]) == 7


def test_a_column_that_is_missing_is_named() -> None:
    inputs = good()
    del inputs["hits"]["x"]
    with pytest.raises(ReferenceDataError, match=r"reference column hits\.x is missing"):
        check_inputs(SIGNATURE, inputs)


@pytest.mark.parametrize(
    ("column_name", "value", "message"),
    [
        (
            "x",
            np.zeros(9, dtype=np.float32),
            "reference column hits.x has shape (9,), needed (10,)",
        ),
        ("x", np.float32(1), "reference column hits.x has shape (), needed (10,)"),
        (
            "cov",
            np.zeros((10, 3, 2), dtype=np.float32),
            "hits.cov has shape (10, 3, 2), needed (10, 2, 3)",
        ),
        ("run", np.zeros(2, dtype=np.uint32), "hits.run has shape (2,), needed ()"),
        ("x", np.zeros(10), "hits.x is torch.float64, the layout says float32: convert it first"),
        ("x", ["a"] * 10, "reference column hits.x"),
        ("x", np.zeros(10, dtype=">f4"), "reference column hits.x"),
    ],
)
def test_a_column_that_does_not_fit_is_named(column_name: str, value: Any, message: str) -> None:
    inputs = good()
    inputs["hits"][column_name] = value
    with pytest.raises(ReferenceDataError) as caught:
        check_inputs(SIGNATURE, inputs)
    assert message in str(caught.value)


@pytest.mark.parametrize("inputs", [{}, None, {"hits": None}, {"hits": [1.0]}], ids=str)
def test_a_collection_that_is_missing_is_named(inputs: Any) -> None:
    with pytest.raises(ReferenceDataError, match="the reference has no collection 'hits'"):
        check_inputs(SIGNATURE, inputs)


def test_row_major_inputs_have_the_columns_in_the_blocks_order() -> None:
    layout = Layout(
        [
            column("a", "float32"),
            eigen("m", "float32", 2, 2),
            scalar("s", "int32"),
            column("b", "int8"),
        ]
    )
    signature = Signature.build(
        {"i": layout, "o": Layout([column("y", "float32")])},
        [
            Block("mixed", "i", ("b", "m", "a"), "float32"),
            Block("scalars", "i", ("s",), "float32"),
            Block("matrix", "i", ("m",)),
        ],
        [Block("z", "o", ("y",))],
        {"n": RowRange(0, 2)},
    )
    arrays = {
        "i": {
            "a": torch.tensor([1.0, 2.0]),
            "m": torch.tensor([[[10.0, 11.0], [12.0, 13.0]], [[20.0, 21.0], [22.0, 23.0]]]),
            "s": torch.tensor(5, dtype=torch.int32),
            "b": torch.tensor([-1, -2], dtype=torch.int8),
        }
    }
    mixed, scalars, matrix = row_major_inputs(signature, arrays, {"n": 2})
    assert mixed.tolist() == [[-1, 10, 11, 12, 13, 1], [-2, 20, 21, 22, 23, 2]]
    assert scalars.tolist() == [5.0]
    assert matrix.tolist() == arrays["i"]["m"].tolist()
    assert row_major_inputs(signature, arrays, {"n": 0})[2].shape == (0, 2, 2)


# -- answers ---------------------------------------------------------------------------------------


def test_a_saved_reference_loads_as_it_was(tmp_path: Path) -> None:
    signature = mlp_signature()
    computed = compute_reference(
        Triple(), signature, random_inputs(signature, 1, {}), make_cases(signature)
    )
    computed.save(tmp_path / "reference.safetensors")
    read = Reference.load(tmp_path / "reference.safetensors")
    assert read.cases == computed.cases
    for outputs, expected in zip(read.outputs, computed.outputs, strict=True):
        assert torch.equal(outputs["probabilities"], expected["probabilities"])
    for name, values in computed.inputs["jets"].items():
        assert torch.equal(read.inputs["jets"][name], values)


@pytest.mark.parametrize("content", [b"", b"not safetensors", save({"w": torch.zeros(2)}), None])
def test_a_file_that_is_no_reference_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "reference.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ReferenceDataError, match="is not a stored reference"):
        Reference.load(path)


def test_a_model_may_return_one_column_as_a_vector() -> None:
    class Vector(torch.nn.Module):
        def forward(self, x: torch.Tensor, cov: torch.Tensor) -> torch.Tensor:
            return x[:, 0] * 2

    reference = compute_reference(Vector(), SIGNATURE, random_inputs(SIGNATURE, 1, {}), ({"n": 3},))
    assert reference.outputs[0]["answers"].shape == (3, 1)


def test_a_model_that_fails_is_refused_with_the_size_and_the_line() -> None:
    class AtThree(torch.nn.Module):
        def forward(self, x: torch.Tensor, cov: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 3:
                raise RuntimeError("three is a crowd")
            return x

    with pytest.raises(CaptureError, match=r"fails at n=3 \(.*test_reference\.py:\d+\): three is"):
        compute_reference(
            AtThree(), SIGNATURE, random_inputs(SIGNATURE, 1, {}), ({"n": 2}, {"n": 3})
        )


READ_AND_WRITTEN = Signature.build(
    {"hits": Layout([column("x", "float32"), column("y", "float32"), eigen("z", "int32", 2)])},
    [Block("features", "hits", ("x",))],
    [Block("answers", "hits", ("y",)), Block("more", "hits", ("z",))],
    {"n": RowRange(0, 10)},
)


def test_columns_that_the_model_writes_need_no_values() -> None:
    inputs = {"hits": {"x": np.ones(10, dtype=np.float32)}}
    checked = check_inputs(READ_AND_WRITTEN, inputs)["hits"]
    assert checked["y"].tolist() == [0.0] * 10
    assert checked["z"].shape == (10, 2)


def test_columns_that_the_model_reads_need_values() -> None:
    with pytest.raises(ReferenceDataError, match=r"hits\.x is missing"):
        check_inputs(READ_AND_WRITTEN, {"hits": {}})
