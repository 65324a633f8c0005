"""Boosted trees give the same answers as XGBoost and LightGBM, on every path of a row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from soa import Signature
from stages.capture import capture
from stages.errors import CaptureError, SourceError
from stages.model import ModelSource, build_model
from stages.reference.answers import random_inputs
from tests.models.building import require_valid, signature_of

Array = npt.NDArray[Any]
FEATURES = ("a", "b", "c", "d")


def events(n: int = 600, seed: int = 1) -> tuple[Array, Array]:
    """Rows with NaN, zeros and repeated values, and labels of three classes."""
    draw = np.random.default_rng(seed)
    x = np.round(draw.normal(size=(n, len(FEATURES))), 2).astype(np.float32)
    x[draw.random(x.shape) < 0.1] = np.nan
    x[draw.random(x.shape) < 0.1] = 0.0
    score = np.nan_to_num(x, nan=0.7) @ np.array([1.0, -2.0, 0.5, 0.0]) + (x[:, 0] == 0)
    return x, np.digitize(score, [-1.0, 1.0])


def probes(model: torch.nn.Module) -> Array:
    """Other rows, with every threshold, its neighbouring floats, and missing values."""
    x, _ = events(300, seed=2)
    threshold = np.unique(model.get_buffer("threshold").numpy().astype(np.float32))
    near = [np.nextafter(threshold, np.float32(side)) for side in (-np.inf, np.inf)]
    values = np.concatenate([threshold, *near, [np.nan, 0.0, -0.0, 1e-36, -1e-36, 1e30, -1e30]])
    draw = np.random.default_rng(3)
    return np.concatenate([x, draw.choice(values, (2000, len(FEATURES))).astype(np.float32)])


def answers(model: torch.nn.Module, x: Array) -> Array:
    """The model's answers to rows (n, 4)."""
    predictions: Array = model(torch.from_numpy(x)).numpy()
    return predictions


XGBOOST: list[tuple[str, dict[str, Any]]] = [
    ("reg:squarederror", {}),
    ("reg:absoluteerror", {}),
    ("binary:logistic", {}),
    ("binary:logistic", {"base_score": 0.2, "tree_method": "exact"}),
    ("binary:hinge", {}),
    ("count:poisson", {}),
    ("multi:softprob", {"num_class": 3}),
    ("multi:softmax", {"num_class": 3, "num_parallel_tree": 2, "subsample": 0.5}),
    ("reg:squarederror", {"booster": "dart", "rate_drop": 0.5}),
]


@pytest.mark.parametrize(("objective", "options"), XGBOOST)
@pytest.mark.parametrize("suffix", [".json", ".ubj"])
def test_xgboosts_answers_on_every_path(
    objective: str, options: dict[str, Any], suffix: str, tmp_path: Path
) -> None:
    xgboost = pytest.importorskip("xgboost", reason="needs xgboost")
    x, y = events()
    labels = y > 0 if objective.startswith("binary") else y
    settings = {"objective": objective, "max_depth": 4, "nthread": 1, "seed": 1, **options}
    booster = xgboost.train(settings, xgboost.DMatrix(x, label=labels), num_boost_round=12)
    booster.save_model(tmp_path / f"trees{suffix}")
    model = build_model(ModelSource(trees=tmp_path / f"trees{suffix}"))
    rows = probes(model)
    expected = booster.predict(xgboost.DMatrix(rows))
    # XGBoost adds the leaves one after the other in float32.
    np.testing.assert_allclose(answers(model, rows), expected, rtol=2e-6, atol=2e-6, strict=True)


LIGHTGBM: list[dict[str, Any]] = [
    {"objective": "regression"},
    {"objective": "regression", "reg_sqrt": True},
    {"objective": "binary", "sigmoid": 0.7},
    {"objective": "multiclass", "num_class": 3},
    {"objective": "multiclassova", "num_class": 3},
    {"objective": "poisson"},
    {"objective": "cross_entropy_lambda"},
    {"objective": "regression", "zero_as_missing": True},
    {"objective": "regression", "use_missing": False},
    {"objective": "binary", "boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.5},
    {"objective": "regression", "boosting": "dart"},
]


@pytest.mark.parametrize(
    "options", LIGHTGBM, ids=lambda options: "-".join(map(str, options.values()))
)
def test_lightgbms_answers_on_every_path(options: dict[str, Any], tmp_path: Path) -> None:
    lightgbm = pytest.importorskip("lightgbm", reason="needs lightgbm")
    x, y = events()
    labels = y > 0 if options["objective"] in ("binary", "cross_entropy_lambda") else y
    settings = {"num_leaves": 15, "num_threads": 1, "verbosity": -1, "seed": 1, **options}
    booster = lightgbm.train(settings, lightgbm.Dataset(x, labels.astype(float)), 12)
    booster.save_model(tmp_path / "trees.txt")
    model = build_model(ModelSource(trees=tmp_path / "trees.txt"))
    rows = probes(model)
    expected = booster.predict(rows)
    np.testing.assert_allclose(answers(model, rows), expected, rtol=1e-13, atol=1e-15, strict=True)


def by_hand(**changes: Any) -> dict[str, Any]:
    """Two equal trees of one branch in XGBoost's format, with changes of a tree or of the learner.

    Each gives -1 below a threshold of 2.0 in the first column, and 1 above; 0.5 is added to both.
    """
    tree = {
        "left_children": [1, -1, -1],
        "right_children": [2, -1, -1],
        "split_indices": [0, 0, 0],
        "split_conditions": [2.0, -1.0, 1.0],
        "default_left": [1, 0, 0],
        "split_type": [0, 0, 0],
        "tree_param": {"size_leaf_vector": "1"},
    }
    tree |= {key: value for key, value in changes.items() if key in tree}
    model = {"trees": [tree, tree], "tree_info": [0, 0]}
    learner = {
        "gradient_booster": {"name": "gbtree", "model": model},
        "learner_model_param": {"base_score": "[5E-1]", "num_class": "0", "num_feature": "2"},
        "objective": {"name": "reg:squarederror"},
        "feature_names": ["b", "a"],
    }
    learner |= {key: value for key, value in changes.items() if key in learner}
    return {"learner": learner, "version": [3, 4, 1]}


def write_trees(folder: Path, **changes: Any) -> Path:
    """Writes the trees of `by_hand` with these changes."""
    file = folder / "trees.json"
    file.write_text(json.dumps(by_hand(**changes)))
    return file


def test_trees_written_by_hand_have_answers_computed_by_hand(tmp_path: Path) -> None:
    """For rows below, at and above the threshold, and for a missing value."""
    model = build_model(ModelSource(trees=write_trees(tmp_path)))
    x = torch.tensor([[1.5, 9.0], [2.0, 9.0], [2.5, 9.0], [torch.nan, 9.0]])
    assert model(x).tolist() == [-1.5, 2.5, 2.5, -1.5]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"split_type": [1, 0, 0]}, "categorical splits"),
        ({"tree_param": {"size_leaf_vector": "2"}}, "leaves of vectors"),
        ({"objective": {"name": "binary:logitraw"}}, "objective 'binary:logitraw'"),
        ({"gradient_booster": {"name": "gblinear"}}, "gblinear"),
        ({"left_children": [7, -1, -1]}, "a child or a feature that is not there"),
        ({"split_indices": [2, 0, 0]}, "a child or a feature that is not there"),
        ({"left_children": [0, -1, -1]}, "in a circle"),
        ({"left_children": [2, -1, -1]}, "the same child"),
        ({"learner_model_param": {}}, "there is no 'num_class'"),
    ],
)
def test_trees_of_xgboost_that_cannot_be_read_are_refused(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=re.escape(says)) as caught:
        build_model(ModelSource(trees=write_trees(tmp_path, **changes)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["trees.json", "trees.txt", "trees.model", "none.txt"])
def test_a_file_that_has_no_trees_is_refused(name: str, tmp_path: Path) -> None:
    if name != "none.txt":
        (tmp_path / name).write_text("tree\n")
    with pytest.raises(SourceError, match=name):
        build_model(ModelSource(trees=tmp_path / name))


@pytest.mark.parametrize(
    ("linear", "categories", "says"),
    [(True, [], "linear trees"), (False, [3], "categorical splits")],
)
def test_trees_of_lightgbm_that_cannot_be_read_are_refused(
    linear: bool, categories: list[int], says: str, tmp_path: Path
) -> None:
    lightgbm = pytest.importorskip("lightgbm", reason="needs lightgbm")
    draw = np.random.default_rng(1)
    x, y = draw.integers(0, 9, (500, 4)).astype(float), draw.random(500)
    y += x[:, 3] % 3
    settings = {"objective": "regression", "num_threads": 1, "verbosity": -1, "linear_tree": linear}
    table = lightgbm.Dataset(x, y, categorical_feature=categories)
    lightgbm.train(settings, table, 2).save_model(tmp_path / "trees.txt")
    with pytest.raises(SourceError, match=says):
        build_model(ModelSource(trees=tmp_path / "trees.txt"))


def signature(columns: str) -> Signature:
    """Columns of these names in, one score out."""
    return signature_of({"features": columns}, {"score": "score"})


@pytest.mark.parametrize(
    ("columns", "says"),
    [("a b", "in the order b, a"), ("b", r"\(n, 2\); the block is \(n, 1\)")],
    ids=["another order", "fewer"],
)
def test_columns_that_are_not_those_of_the_trees_are_refused(
    columns: str, says: str, tmp_path: Path
) -> None:
    model = build_model(ModelSource(trees=write_trees(tmp_path)))
    inputs = random_inputs(signature("a b"), 1, {})
    with pytest.raises(CaptureError, match=says):
        capture(model, signature(columns), inputs, tmp_path, "none")


def test_trees_are_valid_in_engines(tmp_path: Path) -> None:
    model = build_model(ModelSource(trees=write_trees(tmp_path)))
    require_valid(model, signature("b a"), tmp_path, ("exported", "torchscript"))
