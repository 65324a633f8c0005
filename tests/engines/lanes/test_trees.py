"""Decision trees in the code of `lanes`: the leaf of every row, at every width of a call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engines.lanes.compiling.devices import stores
from engines.lanes.planning import planned, row_program
from engines.lanes.tensors import Forest, Leaves
from engines.processes import run_isolated
from tests.engines.lanes.harness import prepared
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
        each = zip(self.forests, features, strict=True)
        return tuple(trees(x).unsqueeze(1) for trees, x in each)


OF_LIGHTGBM = ("one_node", "several_words", "many", "many_larger", "deep")
"""Its comparisons differ; the words of the leaves are those of xgboost's trees."""


def way(forest: Forest) -> str:
    """How a CPU finds the leaves of a few rows, and whether more rows take this way, too."""
    if forest.paths is not None:
        return "all go down" if forest.paths.deep else "few go down"
    if forest.ranks is None:
        return "bits"
    return "ranks, a word a tree" if len(forest.words) == len(forest.trees) else "ranks"


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("kind", ["xgboost", "lightgbm"])
def test_every_row_reaches_its_leaf(kind: str) -> None:
    equal = kind == "lightgbm"
    real = np.float64 if equal else np.float32
    models, features, wanted = list[nn.Module](), list[Tensor](), dict[str, Tensor]()
    for name in OF_LIGHTGBM if equal else FORESTS:
        model, trees = drawn_forest(FORESTS[name], real=real, zero=0.0 if equal else None)
        x = rows_for(trees, 5, 64)
        seen = np.where(np.abs(x) < 1e-35, 0, x) if equal else x  # as LightGBM reads it
        models.append(model)
        features.append(torch.from_numpy(x))
        wanted[name] = torch.tensor(sums(trees, seen, equal), dtype=torch.float64)
    made = prepared(Scores(*models), features, list(wanted))
    plan = planned(row_program(made.program))
    forests = [step.forest for step in plan.steps if isinstance(step, Leaves)]
    assert len(forests) >= len(wanted) and set(map(way, forests)) >= {
        "all go down",
        "few go down",
        "ranks",
        "ranks, a word a tree",
    }
    lanes = made.compiled()
    for n in (1, 2, 3, 4, 5, 8, 9, 17, 64):
        found = lanes(*(x[:n] for x in features))
        for name, right in wanted.items():
            own = found[name].flatten().double()
            torch.testing.assert_close(own, right[:n], rtol=1e-5, atol=1e-5, msg=f"{name}, {n}")


def test_rows_of_other_dtypes() -> None:
    """float64 rows between two float32 are told apart."""
    model, trees = drawn_forest([20, 40], real=np.float64, zero=0.0)
    x = torch.from_numpy(rows_for(trees, 5, 64)).nan_to_num(0.0, 5.0, -5.0).clamp(-5, 5)
    double = x.double()
    double[::2] = torch.nextafter(double[::2], torch.tensor(torch.inf, dtype=torch.float64))
    rows = {"double": double, "whole": x.int(), "half": x.half()}
    lanes = prepared(Scores(model, model, model), [*rows.values()], [*rows]).compiled()
    for n in (1, 7, 64):
        found = lanes(*(each[:n] for each in rows.values()))
        for name, each in rows.items():
            right = sums(trees, each[:n].double().numpy(), True)
            wanted = torch.tensor(right, dtype=torch.float64)
            torch.testing.assert_close(found[name].flatten(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("features", [90, 1500])
def test_many_columns(features: int) -> None:
    """Of 1,500 columns a row's own order would not fit on a thread's stack."""
    model, trees = drawn_forest([9] * 300, features=features)
    x = rows_for(trees, features, 64)
    made = prepared(Scores(model), [torch.from_numpy(x)], ["y"]).compiled()
    wanted = torch.tensor(sums(trees, x, False))
    for n in (1, 2, 64):
        found = made(torch.from_numpy(x[:n]))["y"].flatten()
        torch.testing.assert_close(found, wanted[:n], rtol=1e-5, atol=1e-5)


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
    made = prepared(OfParticles(model), [x], ["y"]).compiled()
    for n in (1, 3, 20, 64):
        torch.testing.assert_close(made(x[:n])["y"], made.eager(x[:n])["y"], rtol=1e-6, atol=1e-6)


def test_a_feature_has_two_columns_only_if_it_needs_them() -> None:
    model, trees = drawn_forest([9] * 20, zero=0.0, real=np.float64)
    assert len(model.columns) == 10
    always = [tree._replace(missing_left=tree.threshold >= 0) for tree in trees]
    one = type(model)(always, [0] * 20, np.zeros(1), 5, (), "identity", zero=0.0)
    assert len(one.columns) == 5
    x = rows_for(trees, 5, 500)
    wanted = sums(always, np.where(np.abs(x) < 1e-35, 0, x), True)
    np.testing.assert_allclose(one(torch.from_numpy(x)).numpy(), wanted, rtol=1e-12, atol=1e-12)


def test_a_process_that_knows_no_trees_loads_the_program(tmp_path: Path) -> None:
    model, trees = drawn_forest([33, 5])
    made = prepared(Scores(model), [torch.from_numpy(rows_for(trees, 5, 40))], ["y"])
    payload = {"program": str(made.program)}
    outcome = run_isolated("tests.engines.steps:graph_of", payload, tmp_path, 60)
    assert outcome.ok and "soa_pipeline.leaves" in outcome.value, outcome.error


@pytest.mark.parametrize("name", [pytest.param("aoti", marks=pytest.mark.long), "onnxruntime"])
def test_other_engines_take_it_apart(name: str) -> None:
    if name == "onnxruntime":
        pytest.importorskip("onnxscript")
    model, trees = drawn_forest([33, 5])
    x = torch.from_numpy(rows_for(trees, 5, 40))
    made = prepared(Scores(model), [x], ["y"])
    assert torch.equal(made.compiled(name)(x)["y"], made.compiled()(x)["y"])


@pytest.mark.parametrize("leaves, small", [(30, True), (700, False)])
def test_only_a_small_forest_is_unrolled_for_gpus(leaves: int, small: bool) -> None:
    """NVRTC takes half a minute for 2,480 nodes, unrolled, and under a second for a loop."""
    model, trees = drawn_forest([leaves])
    made = prepared(Scores(model), [torch.from_numpy(rows_for(trees, 5, 64))], ["score"])
    assert ("registers" in stores(planned(row_program(made.program)))) == small


@pytest.mark.parametrize("columns, goes_down", [(400, True), (9000, False)])
def test_a_row_of_many_columns_does_not_go_down(columns: int, goes_down: bool) -> None:
    """A copy of those that nodes compare would not fit on a thread's stack."""
    model, trees = drawn_forest([1500], features=columns)
    x = torch.from_numpy(rows_for(trees, columns, 64))
    plan = planned(row_program(prepared(Scores(model), [x], ["score"]).program))
    (step,) = (step for step in plan.steps if isinstance(step, Leaves))
    assert (step.forest.paths is not None) == goes_down
