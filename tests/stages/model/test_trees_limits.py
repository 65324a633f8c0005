"""At infinite thresholds and for infinite and missing values, trees decide as their library does.

Every model is a sum of trees of one node: tree k adds 0 on the left and 2^k on the right. So a
score says to which side a row went at each node, and must be equal to the library's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.model import ModelSource, as_torch, build_model
from stages.model.trees import Trees
from tests.models.building import require_valid, signature_of

Array = npt.NDArray[Any]
LARGEST, LARGEST_FLOAT32 = float(np.finfo(np.float64).max), float(np.finfo(np.float32).max)
INFINITE = (np.inf, -np.inf)
FLOAT32 = (*INFINITE, LARGEST_FLOAT32, -LARGEST_FLOAT32, 0.0, -0.0, 1.5, -1.5)
FLOAT64 = (*FLOAT32, LARGEST, -LARGEST, 1e300, 1e-36, -1e-36, 0.1, -0.1)


class Node(NamedTuple):
    """The node of a tree. `missing_left`: the default side of the missing values. `kind` is
    LightGBM's missing type, or the number of ONNX's mode in MODES."""

    feature: int
    threshold: float
    missing_left: bool
    kind: int = 0


def nodes(thresholds: Sequence[float], kinds: Sequence[int] = (0,)) -> st.SearchStrategy[Any]:
    """Up to ten nodes; few thresholds are likely, so that a feature has several nodes of one."""
    node = st.builds(
        Node,
        st.integers(0, 1),
        st.sampled_from(INFINITE) | st.sampled_from(thresholds),
        st.booleans(),
        st.sampled_from(kinds),
    )
    return st.lists(node, min_size=1, max_size=10)


def rows(dtype: type[np.floating[Any]]) -> Array:
    """Rows of two features: NaN, and all thresholds and the numbers next to them in `dtype`."""
    with np.errstate(over="ignore"):
        values = np.array([*FLOAT64, 7.0], dtype)
        near = [np.nextafter(values, dtype(side)) for side in INFINITE]
    x = np.unique(np.concatenate([values, *near, [np.nan, dtype(-0.0)]]))
    return np.stack([x, np.roll(x, 3)], axis=1).astype(dtype)


def requires(model: torch.nn.Module, x: Array, expected: Array) -> None:
    """Requires the scores `expected`; an error shows the rows that have others."""
    scores = model(torch.from_numpy(x)).numpy()
    wrong = scores != expected
    assert not wrong.any(), np.column_stack([x, scores, expected])[wrong]


def lightgbm_text(trees: Sequence[Node]) -> str:
    """A file of LightGBM."""
    header = "version=v4 num_class=1 num_tree_per_iteration=1 label_index=0 max_feature_idx=1"
    lines = ["tree", *header.split(), "objective=regression", "feature_names=a b"]
    lines += ["feature_infos=[-1:1] [-1:1]", ""]
    for k, node in enumerate(trees):
        decision = 2 * node.missing_left + 4 * node.kind
        lines += [f"Tree={k}", "num_leaves=2", "num_cat=0", f"split_feature={node.feature}"]
        lines += ["split_gain=1", f"threshold={node.threshold!r}", f"decision_type={decision}"]
        lines += ["left_child=-1", "right_child=-2", f"leaf_value=0 {2**k}", "leaf_weight=1 1"]
        lines += ["leaf_count=1 1", "internal_value=0", "internal_weight=2", "internal_count=2"]
        lines += ["is_linear=0", "shrinkage=1", "", ""]
    return "\n".join([*lines, "end of trees", ""])


def as_model(name: str, text: str) -> torch.nn.Module:
    """The model in a file with this name and text."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text(text)
        return build_model(ModelSource(trees=file))


NONE, ZERO, NAN = 0, 1, 2  # LightGBM's missing types


@given(trees=nodes(FLOAT64, (NONE, NAN)) | nodes(FLOAT64, (NONE, ZERO)))
def test_lightgbms_sides_of_every_value(trees: list[Node]) -> None:
    lightgbm = pytest.importorskip("lightgbm", reason="needs lightgbm")
    text = lightgbm_text(trees)
    booster, model = lightgbm.Booster(model_str=text), as_model("trees.txt", text)
    for dtype in (np.float64, np.float32):
        x = rows(dtype)
        requires(model, x, booster.predict(x))


@pytest.mark.parametrize("flip", [1, -1])
@pytest.mark.parametrize("options", [{}, {"use_missing": False}, {"zero_as_missing": True}])
def test_lightgbms_split_of_missing_values(
    flip: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """LightGBM writes `x <= inf` for "x is not missing", and means infinite values, too."""
    lightgbm = pytest.importorskip("lightgbm", reason="needs lightgbm")
    draw = np.random.default_rng(0)
    x = draw.normal(size=(500, 2))
    x[:100, 0] = np.nan
    y = flip * np.where(np.isnan(x[:, 0]), 5.0, 0.0) + x[:, 1] * 0.3
    settings = {"verbosity": -1, "num_leaves": 4, "num_threads": 1, **options}
    booster = lightgbm.train(settings, lightgbm.Dataset(x, y), 10)
    booster.save_model(tmp_path / "trees.txt")
    assert ("threshold=inf" in (tmp_path / "trees.txt").read_text()) == (not options)
    model = build_model(ModelSource(trees=tmp_path / "trees.txt"))
    x = np.concatenate([x, rows(np.float64)])
    np.testing.assert_allclose(model(torch.from_numpy(x)), booster.predict(x), rtol=1e-13)


def xgboost_text(trees: Sequence[Node]) -> str:
    """A file of XGBoost."""
    counts = {"num_deleted": "0", "num_feature": "2", "num_nodes": "3", "size_leaf_vector": "1"}
    all_trees = [
        {
            "id": k,
            "tree_param": counts,
            "parents": [2**31 - 1, 0, 0],
            "left_children": [1, -1, -1],
            "right_children": [2, -1, -1],
            "split_indices": [node.feature, 0, 0],
            "split_conditions": [node.threshold, 0.0, 2.0**k],
            "split_type": [0, 0, 0],
            "default_left": [int(node.missing_left), 0, 0],
            "base_weights": [0.0, 0.0, 2.0**k],
            "loss_changes": [1.0, 0.0, 0.0],
            "sum_hessian": [2.0, 1.0, 1.0],
            "categories": [],
            "categories_nodes": [],
            "categories_segments": [],
            "categories_sizes": [],
        }
        for k, node in enumerate(trees)
    ]
    model = {
        "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(trees))},
        "trees": all_trees,
        "tree_info": [0] * len(trees),
        "iteration_indptr": list(range(len(trees) + 1)),
    }
    learner = {
        "attributes": {},
        "feature_names": [],
        "feature_types": [],
        "gradient_booster": {"name": "gbtree", "model": model},
        "learner_model_param": {
            "base_score": "0", "boost_from_average": "1", "num_class": "0", "num_feature": "2",
            "num_target": "1",
        },
        "objective": {"name": "reg:squarederror", "reg_loss_param": {"scale_pos_weight": "1"}},
    }  # fmt: skip
    return json.dumps({"learner": learner, "version": [3, 0, 0]})


@given(trees=nodes(FLOAT32))
def test_xgboosts_sides_of_every_value(trees: list[Node]) -> None:
    """`inplace_predict` takes infinite values; a DMatrix refuses them."""
    xgboost = pytest.importorskip("xgboost", reason="needs xgboost")
    text = xgboost_text(trees)
    booster, model = xgboost.Booster(), as_model("trees.json", text)
    booster.load_model(bytearray(text.encode()))
    x = rows(np.float32)
    requires(model, x, booster.inplace_predict(x))


MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GT", "BRANCH_GTE")


def write_onnx(file: Path, trees: Sequence[Node], dtype: type[np.floating[Any]]) -> None:
    """Writes a file of ONNX."""
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    helper, count = onnx.helper, len(trees)
    of_nodes = {  # of each tree: the inner node, the leaf of true, the leaf of false
        "treeids": np.repeat(range(count), 3).tolist(),
        "nodeids": [0, 1, 2] * count,
        "featureids": [f for node in trees for f in (node.feature, 0, 0)],
        "modes": [mode for node in trees for mode in (MODES[node.kind], "LEAF", "LEAF")],
        "truenodeids": [1, 0, 0] * count,
        "falsenodeids": [2, 0, 0] * count,
        "missing_value_tracks_true": [n for node in trees for n in (int(node.missing_left), 0, 0)],
    }
    attributes: dict[str, Any] = {f"nodes_{name}": values for name, values in of_nodes.items()}
    attributes |= {"target_treeids": np.repeat(range(count), 2).tolist(), "n_targets": 1}
    attributes |= {"target_nodeids": [1, 2] * count, "target_ids": [0] * 2 * count}
    numbers = {
        "nodes_values": [x for node in trees for x in (node.threshold, 0.0, 0.0)],
        "target_weights": [x for k in range(count) for x in (0.0, 2.0**k)],
    }
    for name, values in numbers.items():
        if dtype is np.float64:
            tensor = onnx.numpy_helper.from_array(np.array(values), name)
            attributes[f"{name}_as_tensor"] = tensor
        else:
            attributes[name] = values
    node = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", **attributes
    )
    x = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), "n2")
    x.type.tensor_type.shape.dim[1].Clear()
    x.type.tensor_type.shape.dim[1].dim_value = 2
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    graph = helper.make_graph([node], "net", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), file)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(data=st.data())
def test_onnx_runtimes_sides_of_every_value(
    dtype: type[np.floating[Any]], data: st.DataObject
) -> None:
    trees = data.draw(nodes(FLOAT32 if dtype is np.float32 else FLOAT64, range(len(MODES))))
    x = torch.from_numpy(rows(dtype))
    with TemporaryDirectory() as folder:
        write_onnx(Path(folder) / "trees.onnx", trees, dtype)
        model = build_model(ModelSource(onnx=Path(folder) / "trees.onnx"))
        torch.testing.assert_close(as_torch(model)(x), model(x), rtol=0, atol=0)


SIDES = [
    Node(feature, limit, left, NAN)
    for feature, limits in enumerate([[np.inf, -np.inf], [np.inf, -np.inf, 1.5]])
    for limit in limits
    for left in (True, False)
]


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_splits_of_missing_values_are_valid_in_engines(library: str, tmp_path: Path) -> None:
    if library == "xgboost":
        model, dtype = as_model("trees.json", xgboost_text(SIDES)), "float32"
    else:
        model, dtype = as_model("trees.txt", lightgbm_text(SIDES)), "float64"
    values = [np.nan, np.inf, -np.inf, 0.0, 1.5, 2.0]
    pairs = torch.tensor([[a, b] for a in values for b in values] * 3, dtype=getattr(torch, dtype))
    inputs = {"rows": dict(zip("ab", pairs[:100].T.contiguous(), strict=True))}
    signature = signature_of({"x": f"a:{dtype} b:{dtype}"}, {"y": f"y:{dtype}"})
    require_valid(model, signature, tmp_path, ("exported", "torchscript", "lanes"), inputs)


def test_trees_without_such_splits_have_no_code_for_them() -> None:
    ordinary = as_model("trees.txt", lightgbm_text([Node(0, 1.5, False, NAN)]))
    special = as_model("trees.txt", lightgbm_text([Node(0, np.inf, False, NAN)]))
    assert isinstance(ordinary, Trees)
    assert isinstance(special, Trees)
    assert ordinary.only_missing is None
    assert special.only_missing is not None
