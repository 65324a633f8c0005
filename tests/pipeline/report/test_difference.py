"""Changes between two versions: every difference is named, and nothing else."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.report.difference import _changes, diff, tensor_change
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
    return {"what": what, "a": a, "b": b}


def shown(registry: Registry, a: object, b: object) -> str:
    return cli("diff", a, b, "--registry", registry.uri).stdout


def test_the_same(registry: Registry, jets: Built) -> None:
    found = diff(registry, "jets/1", str(jets.bundle.path))
    assert found["same"]
    assert found["weights"] == {"same": 4, "changes": [], "unreadable": ""}
    assert found["records"] == {}
    assert "the same files, byte for byte" in shown(registry, "jets/1", jets.bundle.path)


def test_one_word(registry: Registry, jets: Built, tmp_path: Path) -> None:
    registry.register(described(jets.bundle, tmp_path / "two", "the second"))
    found = diff(registry, "jets/1", "jets/2")
    assert not found["same"]
    assert found["weights"]["changes"] == []
    assert found["records"].keys() == {"model", "files"}
    assert found["records"]["model"] == [change("description", "a small tagger", "the second")]
    assert [file["what"] for file in found["records"]["files"]] == ["manifest.json"]
    said = shown(registry, "jets/1", "jets/2")
    for part in ("all 4 tensors are equal", "the second", "files that differ: manifest.json"):
        assert part in said


def test_other_weights(both: Registry) -> None:
    weights = diff(both, "jets/1", "jets/2")["weights"]
    assert len(weights["changes"]) == 4 - weights["same"]
    (wide,) = (each for each in weights["changes"] if each["name"].endswith("first.weight"))
    assert (wide["a"], wide["b"]) == ("float32 (48, 6)", "float32 (1920, 6)")
    assert wide["max_abs"] is None


def test_another_argument_of_the_factory(both: Registry) -> None:
    records = diff(both, "jets/1", "jets/2")["records"]
    assert change("model.kwargs.hidden", 48, 1920) in records["config"]


def test_speeds_side_by_side(both: Registry) -> None:
    speeds = diff(both, "jets/1", "jets/2")["speed"]
    by_engine = {speed["engine"]: speed for speed in speeds if speed["target"] == TARGET}
    aoti, exported = by_engine["aoti"], by_engine["exported"]
    assert aoti["a_us"] is not None
    assert aoti["b_us"] is aoti["ratio"] is None  # jets/2 does not have this engine
    assert exported["ratio"] == exported["b_us"] / exported["a_us"]


def test_a_difference_as_text(both: Registry) -> None:
    text = shown(both, "jets/1", "jets/2")
    for part in ("float32[1920,6]", "model.kwargs.hidden", "deviation from", "B / A"):
        assert part in text


def test_a_difference_as_json(both: Registry) -> None:
    found = answer("diff", "jets/1", "jets/2", registry=both)
    assert found == diff(both, "jets/1", "jets/2")


def test_a_target_built_later(registry: Registry, jets: Built, tmp_path: Path) -> None:
    folder = tmp_path / "with"
    shutil.copytree(jets.bundle.path, folder)
    write_annex(folder / "annexes" / CUDA, jets.bundle, CUDA)
    found = diff(registry, "jets/1", str(folder))
    assert not found["same"]
    (added,) = found["records"]["targets"]
    assert (added["what"], added["a"]) == (CUDA, None)
    assert added["b"]["built later"]


def test_a_program_that_cannot_be_read(registry: Registry, jets: Built, tmp_path: Path) -> None:
    """The answer says that the weights are unknown, and the rest is compared."""

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        (folder / "program.pt2").write_bytes(b"nothing")
        manifest["tolerances"]["probabilities"]["atol"] = 0.5
        manifest["targets"][TARGET]["candidates"]["aoti"]["worst"]["probabilities"]["max_rel"] = (
            "Infinity"
        )

    other = resealed(jets.bundle, tmp_path / "other", edit)
    found = diff(registry, "jets/1", str(other.path))
    assert "program.pt2 is not a program torch can load" in found["weights"]["unreadable"]
    assert [each["what"] for each in found["records"]["tolerances"]] == ["probabilities.atol"]
    assert "not compared" in shown(registry, "jets/1", other.path)
    assert answer("diff", "jets/1", other.path, registry=registry) == found
    assert Bundle.open(other.path).digest == found["b"]["digest"]


A, B = torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([1.0, -2.0, 3.0])


def compared(a: torch.Tensor | None, b: torch.Tensor | None) -> dict[str, Any]:
    difference = tensor_change("w", a, b)
    assert difference is not None
    return difference


@pytest.mark.parametrize("tensor", [A, torch.empty(0)])
def test_a_tensor_is_equal_to_its_copy(tensor: torch.Tensor) -> None:
    """NaN equals NaN here."""
    assert tensor_change("w", tensor, tensor.clone()) is None


def test_how_far_tensors_are_apart() -> None:
    change = compared(A[:2], B[:2])
    assert (change["elements"], change["max_abs"], change["norm_difference"]) == (1, 4.0, 4.0)
    assert change["norm_a"] == change["norm_b"] == pytest.approx(5**0.5)


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


def test_a_tensor_that_is_new() -> None:
    assert compared(None, B)["a"] is None


P, Q = {"name": "p", "v": 1}, {"name": "q", "v": 1}


@pytest.mark.parametrize(
    ("a", "b", "found"),
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
)
def test_recorded_values(a: object, b: object, found: list[object]) -> None:
    assert list(_changes(a, b)) == found
