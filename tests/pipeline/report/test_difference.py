"""Changes between two versions: every difference is named, and nothing else."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.report.difference import _find_changes, compare_tensor, diff
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from tests.models.bundles import write_annex
from tests.models.project import TARGET, Built, answer, cli, described, resealed

CUDA = "cuda/sm_90"


@pytest.fixture
def both(registry: Registry, jets: Built, heavy: Built) -> Registry:
    """A registry with jets/1, and jets/2 with forty times the weights and one engine."""
    registry.register(heavy.bundle)
    return registry


def change(what: str, a: object, b: object) -> dict[str, object]:
    """A change as the answer has it: what, in the first version, in the second."""
    return {"what": what, "a": a, "b": b}


def shown(registry: Registry, a: object, b: object) -> str:
    """The difference of two versions as text."""
    return cli("diff", a, b, "--registry", registry.uri).stdout


def test_a_version_is_the_same_as_its_folder(registry: Registry, jets: Built) -> None:
    difference = diff(registry, "jets/1", str(jets.bundle.path))
    assert difference["same"]
    assert difference["weights"] == {"same": 4, "changes": [], "unreadable": ""}
    assert difference["records"] == {}
    assert "the same files, byte for byte" in shown(registry, "jets/1", jets.bundle.path)


def test_one_other_word_in_the_manifest_is_the_only_difference(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    registry.register(described(jets.bundle, tmp_path / "two", "the second"))
    difference = diff(registry, "jets/1", "jets/2")
    assert not difference["same"]
    assert difference["weights"]["changes"] == []
    assert difference["records"].keys() == {"model", "files"}
    assert difference["records"]["model"] == [change("description", "a small tagger", "the second")]
    assert [file["what"] for file in difference["records"]["files"]] == ["manifest.json"]
    text = shown(registry, "jets/1", "jets/2")
    for phrase in ("all 4 tensors are equal", "the second", "files that differ: manifest.json"):
        assert phrase in text


def test_weights_of_other_shapes_are_named_with_both(both: Registry) -> None:
    weights = diff(both, "jets/1", "jets/2")["weights"]
    assert len(weights["changes"]) == 4 - weights["same"]
    (first,) = (tensor for tensor in weights["changes"] if tensor["name"].endswith("first.weight"))
    assert (first["a"], first["b"]) == ("float32 (48, 6)", "float32 (1920, 6)")
    assert first["max_abs"] is None


def test_another_argument_of_the_factory(both: Registry) -> None:
    records = diff(both, "jets/1", "jets/2")["records"]
    assert change("model.kwargs.hidden", 48, 1920) in records["config"]


def test_the_speeds_of_both_versions_are_compared(both: Registry) -> None:
    speeds = diff(both, "jets/1", "jets/2")["speed"]
    by_engine = {speed["engine"]: speed for speed in speeds if speed["target"] == TARGET}
    aoti, exported = by_engine["aoti"], by_engine["exported"]
    assert aoti["a_us"] is not None
    assert aoti["b_us"] is aoti["ratio"] is None  # jets/2 does not have this engine
    assert exported["ratio"] == exported["b_us"] / exported["a_us"]


def test_a_difference_as_text_names_each_kind_of_change(both: Registry) -> None:
    text = shown(both, "jets/1", "jets/2")
    for phrase in ("float32[1920,6]", "model.kwargs.hidden", "deviation from", "B / A"):
        assert phrase in text


def test_a_difference_as_json_is_the_same(both: Registry) -> None:
    assert answer("diff", "jets/1", "jets/2", registry=both) == diff(both, "jets/1", "jets/2")


def test_a_target_built_later_is_a_difference(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    folder = tmp_path / "with"
    shutil.copytree(jets.bundle.path, folder)
    write_annex(folder / "annexes" / CUDA, jets.bundle, CUDA)
    difference = diff(registry, "jets/1", str(folder))
    assert not difference["same"]
    (added,) = difference["records"]["targets"]
    assert (added["what"], added["a"]) == (CUDA, None)
    assert added["b"]["built later"]


def test_the_rest_is_compared_if_a_program_cannot_be_read(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    """The answer says that the weights are unknown."""

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        (folder / "program.pt2").write_bytes(b"nothing")
        manifest["tolerances"]["probabilities"]["atol"] = 0.5
        manifest["targets"][TARGET]["candidates"]["aoti"]["worst"]["probabilities"]["max_rel"] = (
            "Infinity"
        )

    other = resealed(jets.bundle, tmp_path / "other", edit)
    difference = diff(registry, "jets/1", str(other.path))
    assert "program.pt2 is not a program torch can load" in difference["weights"]["unreadable"]
    assert [change["what"] for change in difference["records"]["tolerances"]] == [
        "probabilities.atol"
    ]
    assert "not compared" in shown(registry, "jets/1", other.path)
    assert answer("diff", "jets/1", other.path, registry=registry) == difference
    assert Bundle.open(other.path).digest == difference["b"]["digest"]


# They differ in the last two elements, and the last of A is NaN.
A, B = torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([1.0, -2.0, 3.0])


def compared(a: torch.Tensor | None, b: torch.Tensor | None) -> dict[str, Any]:
    """The difference of two tensors, which there must be."""
    difference = compare_tensor("w", a, b)
    assert difference is not None
    return difference


@pytest.mark.parametrize("tensor", [A, torch.empty(0)])
def test_a_tensor_is_equal_to_its_copy(tensor: torch.Tensor) -> None:
    """NaN equals NaN here."""
    assert compare_tensor("w", tensor, tensor.clone()) is None


def test_how_far_tensors_are_apart() -> None:
    change = compared(A[:2], B[:2])
    apart = 2.0 - -2.0  # in one of the two elements
    assert (change["elements"], change["max_abs"]) == (1, apart)
    assert change["norm_difference"] == apart
    assert change["norm_a"] == change["norm_b"] == pytest.approx(math.hypot(1.0, 2.0))


def test_nan_is_apart_by_no_finite_number() -> None:
    assert math.isnan(compared(A, B)["max_abs"])


def test_zeros_of_both_signs_are_other_bytes() -> None:
    change = compared(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (change["elements"], change["max_abs"]) == (0, 0.0)


def test_another_dtype_is_a_change() -> None:
    change = compared(B, B.half())
    assert (change["a"], change["b"], change["elements"]) == ("float32 (3,)", "float16 (3,)", 0)


def test_integers_that_are_one_float64_are_apart() -> None:
    assert compared(torch.tensor(2**62), torch.tensor(2**62 + 1))


def test_a_tensor_that_is_new_has_nothing_to_compare_with() -> None:
    assert compared(None, B)["a"] is None


P, Q = {"name": "p", "v": 1}, {"name": "q", "v": 1}


@pytest.mark.parametrize(
    ("a", "b", "changes"),
    [
        ({"x": {"y": 1}}, {"x": {"y": 1}}, []),
        (
            {"x": {"y": 1}},
            {"x": {"y": 2}, "z": 3},
            [change("x.y", 1, 2), change("z", None, 3)],
        ),
        ([P, Q], [P, Q | {"v": 2}], [change("q.v", 1, 2)]),
        ({"in": [P, Q]}, {"in": [Q, P]}, [change("in, order", ["p", "q"], ["q", "p"])]),
        ([P], [P, P], [change("", [P], [P, P])]),
        ([1, 2], [2, 1], [change("", [1, 2], [2, 1])]),
        ({"x": None}, {}, [change("x", None, None)]),
    ],
    ids=[
        "equal", "values in a mapping", "a value in an item of a name", "order of named items",
        "two items of one name", "order of plain items", "a key without a value",
    ],
)  # fmt: skip
def test_changes_of_recorded_values_are_named_by_their_place(
    a: object, b: object, changes: list[object]
) -> None:
    assert list(_find_changes(a, b)) == changes
