"""What changed between two versions: nothing that differs is left out, nothing else is named."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.report.difference import Change, _changes, _compare, diff
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from tests.models.bundles import write_annex
from tests.models.project import TARGET, Built, cli, described, resealed

CUDA = "cuda/sm_90"


@pytest.fixture
def both(registry: Registry, jets: Built, heavy: Built) -> Registry:
    """jets/1 and jets/2, which has forty times the weights and one engine."""
    registry.register(heavy.bundle)
    return registry


def test_the_same(registry: Registry, jets: Built) -> None:
    found = diff(registry, "jets/1", str(jets.bundle.path))
    assert found.same
    assert (found.weights.changes, found.records) == ((), {})
    assert found.weights.same == 4
    said = cli("diff", "jets/1", jets.bundle.path, "--registry", registry.uri).stdout
    assert "the same files, byte for byte" in said


def test_one_word(registry: Registry, jets: Built, tmp_path: Path) -> None:
    registry.register(described(jets.bundle, tmp_path / "two", "the second"))
    found = diff(registry, "jets/1", "jets/2")
    assert not found.same
    assert found.weights.changes == ()
    assert found.records["model"] == (Change("description", "a small tagger", "the second"),)
    (file,) = found.records["files"]
    assert file.what == "manifest.json"
    assert found.records.keys() == {"model", "files"}
    said = cli("diff", "jets/1", "jets/2", "--registry", registry.uri).stdout
    for part in ("all 4 tensors are equal", "the second", "files that differ: manifest.json"):
        assert part in said


def test_other_weights(both: Registry) -> None:
    found = diff(both, "jets/1", "jets/2")
    by_name = {change.name: change for change in found.weights.changes}
    assert len(by_name) == 4 - found.weights.same
    wide = next(change for name, change in by_name.items() if name.endswith("first.weight"))
    assert (wide.a, wide.b, wide.max_abs) == ("float32 (48, 6)", "float32 (1920, 6)", None)
    assert Change("model.kwargs.hidden", 48, 1920) in found.records["config"]
    engines = {speed.engine: speed for speed in found.speed if speed.target == TARGET}
    assert engines["aoti"].a_us is not None
    assert (engines["aoti"].b_us, engines["aoti"].ratio) == (None, None)
    exported = engines["exported"]
    assert exported.a_us is not None
    assert exported.b_us is not None
    assert exported.ratio == exported.b_us / exported.a_us
    said = cli("diff", "jets/1", "jets/2", "--registry", both.uri).stdout
    for part in ("float32 (1920, 6)", "model.kwargs.hidden", "deviation from", "B / A"):
        assert part in said
    data = json.loads(cli("diff", "jets/1", "jets/2", "--registry", both.uri, "--json").stdout)
    assert data["weights"]["same"] == found.weights.same
    assert len(data["speed"]) == len(found.speed)
    assert data["records"]["config"][0].keys() == {"what", "a", "b"}


def test_a_target_built_later(registry: Registry, jets: Built, tmp_path: Path) -> None:
    folder = tmp_path / "with"
    shutil.copytree(jets.bundle.path, folder)
    write_annex(folder / "annexes" / CUDA, jets.bundle, CUDA)
    found = diff(registry, "jets/1", str(folder))
    assert not found.same
    (change,) = found.records["targets"]
    assert (change.what, change.a) == (CUDA, None)
    assert change.b["built later"]


def test_a_program_that_cannot_be_read(registry: Registry, jets: Built, tmp_path: Path) -> None:
    """The weights are not known, and that is said; the rest is compared."""

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        (folder / "program.pt2").write_bytes(b"nothing")
        manifest["tolerances"]["probabilities"]["atol"] = 0.5
        manifest["targets"][TARGET]["candidates"]["aoti"]["worst"]["probabilities"]["max_rel"] = (
            "Infinity"
        )

    other = resealed(jets.bundle, tmp_path / "other", edit)
    found = diff(registry, "jets/1", str(other.path))
    assert "program.pt2 is not a program torch can load" in found.weights.unreadable
    assert [change.what for change in found.records["tolerances"]] == ["probabilities.atol"]
    where = ("--registry", registry.uri)
    assert "not compared" in cli("diff", "jets/1", other.path, *where).stdout
    json.loads(cli("diff", "jets/1", other.path, *where, "--json").stdout)
    assert Bundle.open(other.path).digest == found.b.digest


def test_tensors() -> None:
    a = torch.tensor([1.0, 2.0, float("nan")])
    assert _compare("w", a, a.clone()) is None  # NaN is the same NaN
    b = torch.tensor([1.0, -2.0, 3.0])
    found = _compare("w", a[:2], b[:2])
    assert found is not None
    assert (found.elements, found.max_abs) == (1, 4.0)
    assert found.norm_a == found.norm_b == pytest.approx(5**0.5)
    assert found.norm_difference == 4.0
    unknown = _compare("w", a, b)
    assert unknown is not None
    assert unknown.max_abs is not None
    assert math.isnan(unknown.max_abs)  # and no number that would be wrong
    zero = _compare("w", torch.tensor([0.0]), torch.tensor([-0.0]))
    assert zero is not None
    assert (zero.elements, zero.max_abs) == (0, 0.0)
    half = _compare("w", b, b.half())
    assert half is not None
    assert (half.a, half.b, half.elements) == ("float32 (3,)", "float16 (3,)", 0)
    whole = _compare("n", torch.tensor(2**62), torch.tensor(2**62 + 1))
    assert whole is not None  # further than float64 counts: they differ all the same
    assert _compare("w", None, b) is not None
    assert _compare("e", torch.empty(0), torch.empty(0)) is None


def test_recorded_values() -> None:
    def changes(a: object, b: object) -> list[Change]:
        return list(_changes(a, b))

    assert changes({"x": {"y": 1}}, {"x": {"y": 1}}) == []
    assert changes({"x": {"y": 1}}, {"x": {"y": 2}, "z": 3}) == [
        Change("x.y", 1, 2),
        Change("z", None, 3),
    ]
    p, q = {"name": "p", "v": 1}, {"name": "q", "v": 1}
    assert changes([p, q], [p, q | {"v": 2}]) == [Change("q.v", 1, 2)]
    assert changes({"in": [p, q]}, {"in": [q, p]}) == [Change("in, order", ["p", "q"], ["q", "p"])]
    assert changes([p], [p, p]) == [Change("", [p], [p, p])]
    assert changes([1, 2], [2, 1]) == [Change("", [1, 2], [2, 1])]
    assert changes({"x": None}, {}) == [Change("x", None, None)]
