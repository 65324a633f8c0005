"""Decision trees in the code of `lanes`: the leaf of every row, at every width of a call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engines.lanes.compiling.devices import stores_to_try
from engines.lanes.planning import make_plan, make_row_program
from engines.lanes.tensors import Forest, Leaves
from engines.processes import run_isolated
from tests.engines.lanes.harness import Prepared, prepared
from tests.models.forests import drawn_forest, rows_for, sums

# The leaves of trees: of one word, of several, of a tree without a node; more words than fit on a
# thread's stack.
FORESTS = {
    "one_leaf": [1],
    "one_node": [2],
    "a_word": [32, 31, 33, 1, 32],
    "several_words": [64, 65, 200, 1, 3],
    "deep": [500, 1, 400, 500, 450, 500, 400, 500, 500],
    "many": [5] * 300,
    "many_larger": [40, 7, 70] * 50,
    "too_many_words": [2] * 2100,
}


class Scores(nn.Module):
    """The scores of forests, each with features of its own."""

    def __init__(self, *forests: nn.Module) -> None:
        super().__init__()
        self.forests = nn.ModuleList(forests)

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(self.forests, features, strict=True)
        return tuple(trees(x).unsqueeze(1) for trees, x in pairs)


@dataclass(frozen=True)
class Scored:
    """Forests in one network, rows of the features of each, and the right scores of all rows."""

    network: Prepared
    features: list[Tensor]
    scores: dict[str, Tensor]


OF_LIGHTGBM = ("one_node", "several_words", "many", "many_larger", "deep")
"""Its comparisons differ; the words of the leaves are those of xgboost's trees."""


def way(forest: Forest) -> str:
    """How a CPU finds the leaves of a few rows, and whether more rows take this way, too."""
    if forest.paths is not None:
        return "all go down" if forest.paths.deep else "few go down"
    if forest.ranks is None:
        return "bits"
    return "ranks, a word a tree" if len(forest.words) == len(forest.trees) else "ranks"


@pytest.fixture(scope="module", params=["xgboost", "lightgbm"])
def scored(request: pytest.FixtureRequest, traced_once: None) -> Scored:
    lightgbm = request.param == "lightgbm"
    models, features, scores = list[nn.Module](), list[Tensor](), dict[str, Tensor]()
    for name in OF_LIGHTGBM if lightgbm else FORESTS:
        real = np.float64 if lightgbm else np.float32
        model, trees = drawn_forest(FORESTS[name], real=real, zero=0.0 if lightgbm else None)
        x = rows_for(trees, 5, 64)
        models.append(model)
        features.append(torch.from_numpy(x))
        read = as_lightgbm_reads(x) if lightgbm else x
        scores[name] = torch.tensor(sums(trees, read, lightgbm), dtype=torch.float64)
    return Scored(prepared(Scores(*models), features, list(scores)), features, scores)


def as_lightgbm_reads(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """LightGBM takes a number nearer to 0 than its kZeroThreshold, 1e-35, for 0."""
    return np.where(np.abs(x) < 1e-35, 0, x)


def test_the_forests_take_every_way_to_their_leaves(scored: Scored) -> None:
    plan = make_plan(make_row_program(scored.network.program))
    forests = [step.forest for step in plan.steps if isinstance(step, Leaves)]
    assert len(forests) >= len(scored.scores)
    ways = {way(forest) for forest in forests}
    assert ways >= {"all go down", "few go down", "ranks", "ranks, a word a tree"}


def test_every_row_reaches_its_leaf(scored: Scored) -> None:
    library = scored.network.compiled()
    for n in (1, 2, 3, 4, 5, 8, 9, 17, 64):
        answers = library(*(x[:n] for x in scored.features))
        for name, right in scored.scores.items():
            own = answers[name].flatten().double()
            torch.testing.assert_close(own, right[:n], rtol=1e-5, atol=1e-5, msg=f"{name}, {n}")


def test_rows_of_other_dtypes_reach_their_leaves() -> None:
    """float64 rows between two float32 are told apart."""
    model, trees = drawn_forest([20, 40], real=np.float64, zero=0.0)
    x = torch.from_numpy(rows_for(trees, 5, 64)).nan_to_num(0.0, 5.0, -5.0).clamp(-5, 5)
    double = x.double()
    double[::2] = torch.nextafter(double[::2], torch.tensor(torch.inf, dtype=torch.float64))
    rows = {"double": double, "whole": x.int(), "half": x.half()}
    library = prepared(Scores(model, model, model), [*rows.values()], [*rows]).compiled()
    for n in (1, 7, 64):
        answers = library(*(x[:n] for x in rows.values()))
        for name, x in rows.items():
            scores = sums(trees, x[:n].double().numpy(), True)
            wanted = torch.tensor(scores, dtype=torch.float64)
            torch.testing.assert_close(answers[name].flatten(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("features", [90, 1500])
def test_rows_of_many_columns_reach_their_leaves(features: int) -> None:
    """Of 1,500 columns a row's own order would not fit on a thread's stack."""
    model, trees = drawn_forest([9] * 300, features=features)
    x = rows_for(trees, features, 64)
    library = prepared(Scores(model), [torch.from_numpy(x)], ["y"]).compiled()
    wanted = torch.tensor(sums(trees, x, False))
    for n in (1, 2, 64):
        answers = library(torch.from_numpy(x[:n]))["y"].flatten()
        torch.testing.assert_close(answers, wanted[:n], rtol=1e-5, atol=1e-5)


class OfParticles(nn.Module):
    """The best score among the seven particles of an event."""

    def __init__(self, trees: nn.Module) -> None:
        super().__init__()
        self.trees = trees

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.trees(x.flatten(0, 1)).view(-1, 7).amax(1, keepdim=True),)


def test_trees_score_the_particles_of_an_event() -> None:
    model, trees = drawn_forest([40, 7, 90])
    x = torch.from_numpy(rows_for(trees, 5, 64 * 7)).view(64, 7, 5)
    library = prepared(OfParticles(model), [x], ["y"]).compiled()
    for n in (1, 3, 20, 64):
        answers, wanted = library(x[:n])["y"], library.eager(x[:n])["y"]
        torch.testing.assert_close(answers, wanted, rtol=1e-6, atol=1e-6)


def test_a_feature_has_two_columns_if_missing_values_differ_from_zero() -> None:
    """The drawn nodes send a missing value to either side: five features, each in two columns."""
    model, _ = drawn_forest([9] * 20, zero=0.0, real=np.float64)
    assert len(model.columns) == 2 * 5


def test_a_feature_has_one_column_if_missing_values_go_where_zero_goes() -> None:
    drawn, trees = drawn_forest([9] * 20, zero=0.0, real=np.float64)
    as_zero = [tree._replace(missing_left=tree.threshold >= 0) for tree in trees]
    model = type(drawn)(as_zero, [0] * 20, np.zeros(1), 5, (), "identity", zero=0.0)
    assert len(model.columns) == 5
    x = rows_for(trees, 5, 500)
    wanted = sums(as_zero, as_lightgbm_reads(x), True)
    np.testing.assert_allclose(model(torch.from_numpy(x)).numpy(), wanted, rtol=1e-12, atol=1e-12)


def test_a_process_that_knows_no_trees_loads_the_program(tmp_path: Path) -> None:
    model, trees = drawn_forest([33, 5])
    network = prepared(Scores(model), [torch.from_numpy(rows_for(trees, 5, 40))], ["y"])
    payload = {"program": str(network.program)}
    outcome = run_isolated("tests.engines.steps:graph_of", payload, tmp_path, 60)
    assert outcome.ok and "soa_pipeline.leaves" in outcome.value, outcome.error


@pytest.mark.parametrize("name", [pytest.param("aoti", marks=pytest.mark.long), "onnxruntime"])
def test_other_engines_give_the_same_scores(name: str) -> None:
    if name == "onnxruntime":
        pytest.importorskip("onnxscript")
    model, trees = drawn_forest([33, 5])
    x = torch.from_numpy(rows_for(trees, 5, 40))
    network = prepared(Scores(model), [x], ["y"])
    assert torch.equal(network.compiled(name)(x)["y"], network.compiled()(x)["y"])


@pytest.mark.parametrize("leaves, small", [(30, True), (700, False)])
def test_only_a_small_forest_is_unrolled_for_gpus(leaves: int, small: bool) -> None:
    """NVRTC takes half a minute for 2,480 nodes, unrolled, and under a second for a loop."""
    model, trees = drawn_forest([leaves])
    network = prepared(Scores(model), [torch.from_numpy(rows_for(trees, 5, 64))], ["score"])
    assert ("registers" in stores_to_try(make_plan(make_row_program(network.program)))) == small


@pytest.mark.parametrize("columns, goes_down", [(400, True), (9000, False)])
def test_a_row_of_many_columns_does_not_go_down(columns: int, goes_down: bool) -> None:
    """A copy of those that nodes compare would not fit on a thread's stack."""
    model, trees = drawn_forest([1500], features=columns)
    x = torch.from_numpy(rows_for(trees, columns, 64))
    plan = make_plan(make_row_program(prepared(Scores(model), [x], ["score"]).program))
    (step,) = (step for step in plan.steps if isinstance(step, Leaves))
    assert (step.forest.paths is not None) == goes_down
