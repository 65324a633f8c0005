"""Which engines build, where nobody names any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines import DEFAULT_ENGINES, Target, engine
from engines.base import QUICK_ENGINES
from pipeline.building import candidates
from pipeline.building.cache import StageCache
from pipeline.building.candidates import Recipe, Work, build_targets
from pipeline.config import load_config
from runtime.checked import default_tolerance
from stages.capture import capture
from stages.reference.answers import random_inputs
from tests.models.building import mlp_signature

TARGET = Target.parse("cpu/x86-64-v3")
ROOT = Path(__file__).parents[3]


class OfRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x[:, :3])


class OfAllRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] - x[:, :3].amax(0, keepdim=True).clamp(min=6)


def built(
    model: nn.Module, folder: Path, by_default: bool, engines: tuple[str, ...] = QUICK_ENGINES
) -> dict[str, str]:
    """The verdict on each candidate."""
    folder.mkdir(exist_ok=True)
    signature = mlp_signature(highest=20, lowest=1)
    captured = capture(model.eval(), signature, random_inputs(signature, 1, {}), folder, "none")
    tolerances = {b.name: default_tolerance("float32") for b in signature.outputs}
    recipe = Recipe(engines, {}, 120.0, tolerances, frozenset(), None, 0.1, by_default)
    work = Work(StageCache(folder / "cache"), lambda text: None)
    found = build_targets(work, captured, [TARGET], recipe, "a")[str(TARGET)]
    return {name: report.verdict for name, report in found.reports.items()}


def test_what_stands_in_for_lanes_is_built_where_that_gave_nothing(tmp_path: Path) -> None:
    assert built(OfRows(), tmp_path / "a", by_default=True) == {"lanes": "valid"}
    found = built(OfAllRows(), tmp_path / "b", by_default=True)
    assert found == {"lanes": "not applicable", "exported": "valid"}


def test_where_a_row_is_much_work_another_engine_joins_the_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = ("lanes", "aoti", "exported")
    monkeypatch.setattr(candidates, "_HEAVY_S", 0.0)
    found = built(OfRows(), tmp_path, by_default=True, engines=engines)
    assert found == {"lanes": "valid", "aoti": "valid"}


def test_both_are_built_where_they_are_named(tmp_path: Path) -> None:
    assert built(OfRows(), tmp_path, by_default=False) == dict.fromkeys(QUICK_ENGINES, "valid")


def test_a_quick_config_has_other_engines_and_another_digest() -> None:
    config = load_config(ROOT / "configs" / "demo.yaml")
    quick = config.quick()
    assert (config.names_engines, quick.names_engines) == (False, False)
    assert quick.engines == QUICK_ENGINES != config.engines
    assert quick.digest() != config.digest()


def test_all_others_stand_in_for_lanes() -> None:
    assert [name for name in DEFAULT_ENGINES if not engine(name).in_place_of] == ["lanes"]
    assert {engine(name).in_place_of for name in DEFAULT_ENGINES} == {"", "lanes"}
