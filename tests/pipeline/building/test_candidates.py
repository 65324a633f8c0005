"""Which engines build a model if the config names none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines import DEFAULT_ENGINES, Target, engine
from engines.base import QUICK_ENGINES
from pipeline.building import steps
from pipeline.building.candidates import build_targets
from pipeline.building.steps import Recipe
from pipeline.building.work import Work
from pipeline.config import load_config
from runtime.checked import default_tolerance
from stages.capture import Capture, capture
from stages.reference.answers import random_inputs
from tests.models.building import mlp_signature

TARGET = Target.parse("cpu/x86-64-v3")
ROOT = Path(__file__).parents[3]


class OfRows(nn.Module):
    """Each row by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x[:, :3])


class OfAllRows(nn.Module):
    """Rows that see each other, for which the engine lanes is not made."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] - x[:, :3].amax(0, keepdim=True).clamp(min=6)


def captured(model: nn.Module, folder: Path) -> Capture:
    """The capture of a model for 1 to 20 rows."""
    signature = mlp_signature(highest=20, lowest=1)
    return capture(model.eval(), signature, random_inputs(signature, 1, {}), folder, "none")


@pytest.fixture(scope="module")
def of_rows(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return captured(OfRows(), tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def of_all_rows(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return captured(OfAllRows(), tmp_path_factory.mktemp("all_rows"))


def verdicts(
    model: Capture, by_default: bool, engines: tuple[str, ...] = QUICK_ENGINES
) -> dict[str, str]:
    """The verdict on each candidate. Artifacts that earlier tests have built are used again."""
    tolerances = {b.name: default_tolerance("float32") for b in model.signature.outputs}
    recipe = Recipe(engines, {}, 120.0, tolerances, frozenset(), None, 0.1, by_default)
    result = build_targets(Work(model.folder / "cache"), model, [TARGET], recipe)[str(TARGET)]
    return {name: candidate.report.verdict for name, candidate in result.candidates.items()}


def test_what_stands_in_for_lanes_is_not_built_where_lanes_is_valid(of_rows: Capture) -> None:
    assert verdicts(of_rows, by_default=True) == {"lanes": "valid"}


def test_what_stands_in_for_lanes_is_built_where_lanes_gave_nothing(of_all_rows: Capture) -> None:
    candidates = verdicts(of_all_rows, by_default=True)
    assert candidates == {"lanes": "not applicable", "exported": "valid"}


def test_where_a_row_is_much_work_another_engine_joins_the_race(
    of_rows: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the engines that can replace lanes, only those for heavy rows are built."""
    engines = ("lanes", "exported", "torchscript")
    monkeypatch.setattr(steps, "HEAVY_S", 0.0)
    monkeypatch.setattr(type(engine("exported")), "for_heavy_rows", True)
    candidates = verdicts(of_rows, by_default=True, engines=engines)
    assert candidates == {"lanes": "valid", "exported": "valid"}


def test_the_next_run_tries_again_what_had_no_time_to_be_validated(of_rows: Capture) -> None:
    work = Work(of_rows.folder / "cache")
    recipe = Recipe(("lanes",), {}, 120.0, {}, frozenset(), None)
    compiled = steps.Steps(work, of_rows, recipe).compile(TARGET, "lanes")
    assert not work.try_again
    report = steps.Steps(work, of_rows, replace(recipe, timeout_s=1e-3)).judge(TARGET, compiled, 0)
    assert report.code == "candidate-timeout"
    assert work.try_again


def test_engines_that_are_named_are_all_built(of_rows: Capture) -> None:
    assert verdicts(of_rows, by_default=False) == dict.fromkeys(QUICK_ENGINES, "valid")


def test_a_quick_config_has_other_engines_and_another_digest() -> None:
    config = load_config(ROOT / "configs" / "demo.yaml")
    quick = config.quick()
    assert (config.names_engines, quick.names_engines) == (False, False)
    assert quick.engines == QUICK_ENGINES != config.engines
    assert quick.digest() != config.digest()


def test_all_other_default_engines_stand_in_for_lanes() -> None:
    in_place_of = {name: engine(name).in_place_of for name in DEFAULT_ENGINES}
    assert in_place_of.pop("lanes") == ""
    assert {*in_place_of.values()} == {"lanes"}


def test_aoti_is_the_only_default_engine_for_heavy_rows() -> None:
    assert [name for name in DEFAULT_ENGINES if engine(name).for_heavy_rows] == ["aoti"]
