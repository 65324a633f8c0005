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
    found: Array = model(torch.from_numpy(x)).numpy()
    return found


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


@pytest.mark.parametrize(("objective", "more"), XGBOOST)
@pytest.mark.parametrize("suffix", [".json", ".ubj"])
def test_xgboost(objective: str, more: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    xgboost = pytest.importorskip("xgboost", reason="needs xgboost")
    x, y = events()
    labels = y > 0 if objective.startswith("binary") else y
    told = {"objective": objective, "max_depth": 4, "nthread": 1, "seed": 1, **more}
    booster = xgboost.train(told, xgboost.DMatrix(x, label=labels), num_boost_round=12)
    booster.save_model(tmp_path / f"trees{suffix}")
    model = build_model(ModelSource(trees=tmp_path / f"trees{suffix}"))
    given = probes(model)
    expected = booster.predict(xgboost.DMatrix(given))
    # XGBoost adds the leaves one after the other in float32.
    np.testing.assert_allclose(answers(model, given), expected, rtol=2e-6, atol=2e-6, strict=True)


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


@pytest.mark.parametrize("more", LIGHTGBM, ids=lambda told: "-".join(map(str, told.values())))
def test_lightgbm(more: dict[str, Any], tmp_path: Path) -> None:
    lightgbm = pytest.importorskip("lightgbm", reason="needs lightgbm")
    x, y = events()
    labels = y > 0 if more["objective"] in ("binary", "cross_entropy_lambda") else y
    told = {"num_leaves": 15, "num_threads": 1, "verbosity": -1, "seed": 1, **more}
    booster = lightgbm.train(told, lightgbm.Dataset(x, labels.astype(float)), 12)
    booster.save_model(tmp_path / "trees.txt")
    model = build_model(ModelSource(trees=tmp_path / "trees.txt"))
    given = probes(model)
    expected = booster.predict(given)
    np.testing.assert_allclose(answers(model, given), expected, rtol=1e-13, atol=1e-15, strict=True)


# Two trees in XGBoost's format, and the answer to each row of `x`, by hand; 0.5 is the base of the
# margin.
def by_hand(**changes: Any) -> dict[str, Any]:
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


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "trees.json"
    file.write_text(json.dumps(by_hand(**changes)))
    return file


def test_by_hand(tmp_path: Path) -> None:
    """Without the libraries: rows below, at and above the threshold, and a missing value."""
    model = build_model(ModelSource(trees=written(tmp_path)))
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
def test_what_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=re.escape(says)) as caught:
        build_model(ModelSource(trees=written(tmp_path, **changes)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["trees.json", "trees.txt", "trees.model", "none.txt"])
def test_a_file_that_is_none(name: str, tmp_path: Path) -> None:
    if name != "none.txt":
        (tmp_path / name).write_text("tree\n")
    with pytest.raises(SourceError, match=name):
        build_model(ModelSource(trees=tmp_path / name))


@pytest.mark.parametrize(
    ("linear", "categories", "says"),
    [(True, [], "linear trees"), (False, [3], "categorical splits")],
)
def test_what_is_refused_of_lightgbm(
    linear: bool, categories: list[int], says: str, tmp_path: Path
) -> None:
    lightgbm = pytest.importorskip("lightgbm", reason="needs lightgbm")
    draw = np.random.default_rng(1)
    x, y = draw.integers(0, 9, (500, 4)).astype(float), draw.random(500)
    y += x[:, 3] % 3
    told = {"objective": "regression", "num_threads": 1, "verbosity": -1, "linear_tree": linear}
    given = lightgbm.Dataset(x, y, categorical_feature=categories)
    lightgbm.train(told, given, 2).save_model(tmp_path / "trees.txt")
    with pytest.raises(SourceError, match=says):
        build_model(ModelSource(trees=tmp_path / "trees.txt"))


def signature(columns: str) -> Signature:
    return signature_of({"features": columns}, {"score": "score"})


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    model = build_model(ModelSource(trees=written(tmp_path)))
    right, wrong = signature("b a"), signature("a b")
    with pytest.raises(CaptureError, match="in the order b, a"):
        capture(model, wrong, random_inputs(wrong, 1, {}), tmp_path, "none")
    with pytest.raises(CaptureError, match=r"\(n, 2\); the block is \(n, 1\)"):
        capture(model, signature("b"), random_inputs(wrong, 1, {}), tmp_path, "none")
    require_valid(model, right, tmp_path, ("exported", "torchscript"))
