"""Which engines build, where nobody names any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines import ENGINES, Target, engine
from pipeline.building import candidates
from pipeline.building.cache import StageCache
from pipeline.building.candidates import Recipe, Work, build_targets
from runtime.checked import default_tolerance
from stages.capture import capture
from stages.reference.answers import random_inputs
from tests.models.building import mlp_signature

TARGET = Target.parse("cpu/x86-64-v3")
BOTH = ("lanes", "exported")


class OfRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x[:, :3])


class OfAllRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] - x[:, :3].amax(0, keepdim=True).clamp(min=6)


def built(model: nn.Module, folder: Path, engines: tuple[str, ...]) -> dict[str, str]:
    """The verdict on each candidate."""
    folder.mkdir(exist_ok=True)
    signature = mlp_signature(highest=20, lowest=1)
    captured = capture(model.eval(), signature, random_inputs(signature, 1, {}), folder, "none")
    tolerances = {b.name: default_tolerance("float32") for b in signature.outputs}
    recipe = Recipe(engines, {}, 120.0, tolerances, frozenset(), None, 0.1)
    work = Work(StageCache(folder / "cache"), lambda text: None)
    found = build_targets(work, captured, [TARGET], recipe, "a")[str(TARGET)]
    return {name: report.verdict for name, report in found.reports.items()}


@pytest.fixture(autouse=True)
def in_place_of_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`exported`, which takes no time to build."""
    monkeypatch.setattr(type(engine("exported")), "in_place_of", "lanes")


def test_what_stands_in_for_lanes_is_built_where_that_gave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "DEFAULT_ENGINES", BOTH)
    assert built(OfRows(), tmp_path / "a", BOTH) == {"lanes": "valid"}
    found = built(OfAllRows(), tmp_path / "b", BOTH)
    assert found == {"lanes": "not applicable", "exported": "valid"}


def test_both_are_built_where_they_are_named(tmp_path: Path) -> None:
    assert built(OfRows(), tmp_path, BOTH) == dict.fromkeys(BOTH, "valid")


def test_what_stands_in_for_another() -> None:
    assert {n: engine(n).in_place_of for n in ENGINES if n != "exported"} == {
        n: "lanes" if n == "aoti-standalone" else "" for n in ENGINES if n != "exported"
    }
