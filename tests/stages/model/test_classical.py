"""Operators of `ai.onnx.ml` give the answers of ONNX Runtime, and files those of their library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from soa import Block, Layout, RowRange, Signature, column
from stages.errors import SourceError
from stages.model import ModelSource, as_torch, build_model
from tests.models.building import require_valid

Array = npt.NDArray[Any]
FILES = Path(__file__).parents[2] / "models" / "sources"  # make.py there has made them
CLASSES = {"network": ["b", "c", "light"]}


@pytest.mark.parametrize("name", ["network", "linear", "forest", "boosted", "catboost"])
def test_a_file_gives_the_answers_of_its_library(name: str) -> None:
    """Classes that are text become their numbers, and a note lists them."""
    notes: list[str] = []
    model = build_model(ModelSource(onnx=FILES / f"{name}.onnx"), notes.append)
    with np.load(FILES / f"{name}.npz") as stored:
        x, label, scores = stored["x"], stored["label"], stored["scores"]
    if name in CLASSES:
        label = np.array([CLASSES[name].index(text) for text in label])
        assert any(", ".join(CLASSES[name]) in note for note in notes)
    for network in (model, as_torch(model)):
        outputs = network(torch.from_numpy(x))
        assert np.array_equal(outputs[0].numpy(), label)
        np.testing.assert_allclose(outputs[1].numpy(), scores, rtol=1e-5, atol=1e-6)


def test_a_category_that_the_encoder_does_not_know_has_the_answer_of_onnx_runtime() -> None:
    model = build_model(ModelSource(onnx=FILES / "network.onnx"))
    x = torch.tensor([[0.5, 0.5, 0.5, 17.0]])
    for expected, output in zip(model(x), as_torch(model)(x), strict=True):
        torch.testing.assert_close(output, expected)


def test_a_label_and_scores_are_valid_in_engines(tmp_path: Path) -> None:
    signature = Signature.build(
        {
            "jets": Layout([column(name, "float32") for name in "abcd"]),
            "tags": Layout([column("label", "int64"), *(column(c, "float32") for c in "xy")]),
        },
        [Block("features", "jets", tuple("abcd"))],
        [Block("label", "tags", ("label",), shape=()), Block("scores", "tags", ("x", "y"))],
        {"n": RowRange(0, 100)},
    )
    model = build_model(ModelSource(onnx=FILES / "boosted.onnx"))
    require_valid(model, signature, tmp_path, ("exported", "lanes"), route="none")


def write_node(folder: Path, kind: str, x: Array, dtypes: list[int], **attributes: Any) -> Path:
    """Writes a file with one node for x; `dtypes` are those of its outputs."""
    names = [f"y{i}" for i in range(len(dtypes))]
    node = helper.make_node(kind, ["x"], names, domain="ai.onnx.ml", **attributes)
    constants = []
    if kind == "ArrayFeatureExtractor":
        node.input.append("places")
        constants = [numpy_helper.from_array(np.array([2, 0]), "places")]
    dtype = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [node],
        "net",
        [helper.make_tensor_value_info("x", dtype, ["n", *x.shape[1:]])],
        [
            helper.make_tensor_value_info(name, output, None)
            for name, output in zip(names, dtypes, strict=True)
        ],
        constants,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), folder / "net.onnx")
    return folder / "net.onnx"


def check(folder: Path, kind: str, x: Array, dtypes: list[int], **attributes: Any) -> None:
    """Requires of a node the answers of ONNX Runtime."""
    model = build_model(ModelSource(onnx=write_node(folder, kind, x, dtypes, **attributes)))
    rows = torch.from_numpy(x)
    for output, expected in zip(as_torch(model)(rows), model(rows), strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-7, equal_nan=True)


FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
SOME = np.array([[1, -2.5, 0], [0, 0, 0], [np.nan, 1, 7], [3, 3, -1], [1.5, -1, 2]], np.float32)
WHOLE = np.array([[1, -2, 0], [0, 0, 0], [5, 1, 7]], np.int64)
TWO = {"coefficients": [1.0, 2.0, -1.0, 0.5, -1.0, 0.25], "intercepts": [0.5, -0.5]}


@pytest.mark.parametrize(
    ("kind", "x", "dtype", "attributes"),
    [
        ("Scaler", SOME, FLOAT, {"offset": [1.0, 2.0, 3.0], "scale": [0.3, 3.0, 0.1]}),
        ("Scaler", WHOLE, FLOAT, {"offset": [1.5], "scale": [0.3]}),
        *(("Normalizer", x, FLOAT, {"norm": n}) for x in (SOME, WHOLE) for n in ("L1", "L2")),
        ("Normalizer", WHOLE, FLOAT, {"norm": "MAX"}),
        ("Imputer", SOME, FLOAT,
         {"imputed_value_floats": [1.0, 2.0, 3.0], "replaced_value_float": float("nan")}),
        ("Imputer", WHOLE, INT, {"imputed_value_int64s": [9], "replaced_value_int64": 0}),
        ("OneHotEncoder", WHOLE, FLOAT, {"cats_int64s": [7, 0, 5]}),
        ("OneHotEncoder", np.nan_to_num(SOME), FLOAT, {"cats_int64s": [1, 0, 5]}),
        ("LabelEncoder", WHOLE, INT,
         {"keys_int64s": [0, 5, 7], "values_int64s": [4, 3, 2], "default_int64": 17}),
        ("LabelEncoder", WHOLE, FLOAT,
         {"keys_int64s": [0, 7], "values_floats": [0.5, float("inf")]}),
        ("LabelEncoder", SOME, INT, {"keys_floats": [1.5, 0.0], "values_int64s": [5, 6]}),
        ("ArrayFeatureExtractor", SOME, FLOAT, {}),
        ("FeatureVectorizer", SOME, FLOAT, {"inputdimensions": [3]}),
        ("Binarizer", SOME[:2], FLOAT, {"threshold": 0.5}),
        ("LinearRegressor", SOME, FLOAT, {"coefficients": [1.0, 2.0, 3.0], "intercepts": [0.5]}),
        *(("LinearRegressor", SOME, FLOAT, {**TWO, "targets": 2, "post_transform": post})
          for post in ("NONE", "SOFTMAX", "LOGISTIC")),
    ],
)  # fmt: skip
def test_an_operator_gives_the_answers_of_onnx_runtime(
    kind: str, x: Array, dtype: int, attributes: dict[str, Any], tmp_path: Path
) -> None:
    check(tmp_path, kind, x, [dtype], **attributes)


POSTS = ("NONE", "LOGISTIC", "SOFTMAX")


@pytest.mark.parametrize("post", POSTS)
@pytest.mark.parametrize(
    "weights", [{"coefficients": [1.0, 2.0, -1.0], "intercepts": [0.5]}, TWO], ids=["one", "two"]
)
def test_linear_classifiers_have_the_answers_of_onnx_runtime(
    post: str, weights: dict[str, Any], tmp_path: Path
) -> None:
    """With one score for two classes, and with a score for each."""
    labels = {"classlabels_ints": [10, 20], "post_transform": post}
    check(tmp_path, "LinearClassifier", SOME[[0, 1, 3, 4]], [INT, FLOAT], **weights, **labels)


def trees(kind: str, votes: list[tuple[int, int, int, float]], mode: str, track: int) -> Any:
    """The attributes of two trees of one branch; a vote is (tree, leaf 1 or 2, class, weight).

    `track`: whether a missing value takes the branch of true (1) or of false (0).
    """
    tree, leaf, classes, weight = zip(*votes, strict=True)
    nodes: dict[str, Any] = {
        "treeids": [0, 0, 0, 1, 1, 1],
        "nodeids": [0, 1, 2] * 2,
        "featureids": [0, 0, 0, 2, 0, 0],
        "modes": [mode, "LEAF", "LEAF"] * 2,
        "values": [1.0, 0.0, 0.0, 2.0, 0.0, 0.0],
        "truenodeids": [1, 0, 0] * 2,
        "falsenodeids": [2, 0, 0] * 2,
        "missing_value_tracks_true": [track, 0, 0] * 2,
    }
    leaves = {"treeids": tree, "nodeids": leaf, "ids": classes, "weights": weight}
    own = {f"{kind}_{name}": value for name, value in leaves.items()}
    return {f"nodes_{name}": value for name, value in nodes.items()} | own


def votes_of_all_leaves(
    *weights: float, classes: tuple[int, ...]
) -> list[tuple[int, int, int, float]]:
    """Votes of each leaf of both trees for each of the classes; the weights come round."""
    places = [(tree, leaf, c) for tree in (0, 1) for leaf in (1, 2) for c in classes]
    return [(*place, weights[i % len(weights)]) for i, place in enumerate(places)]


MIXED = (0.5, -0.75, 0.125, 1.25, -0.375)
VOTES = [
    (votes_of_all_leaves(*MIXED, classes=(0,)), [0, 1]),
    (votes_of_all_leaves(0.125, 0.5, 0.25, classes=(0,)), [10, 20]),
    (votes_of_all_leaves(*MIXED, classes=(1,)), [10, 20]),
    (votes_of_all_leaves(*MIXED, classes=(0, 1)), [10, 20]),
    (votes_of_all_leaves(*MIXED, classes=(0, 1, 2)), [10, 20, 30]),
    ([(0, 1, 0, 0.5), (0, 2, 0, -0.5), (1, 1, 1, 0.25), (1, 2, 1, -1.0)], [7, 8]),
]
MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GT", "BRANCH_GTE"]
ROWS = np.concatenate([SOME, [[1, 0, 2], [0.9, 0, 2.1], [1.1, 0, 1.9]]]).astype(np.float32)


@pytest.mark.parametrize("post", POSTS)
@pytest.mark.parametrize(("votes", "labels"), VOTES)
@pytest.mark.parametrize("with_base", [False, True])
def test_classifying_trees_have_the_answers_of_onnx_runtime(
    post: str, votes: Any, labels: list[int], with_base: bool, tmp_path: Path
) -> None:
    attributes = trees("class", votes, "BRANCH_LEQ", 0)
    attributes |= {"classlabels_int64s": labels, "post_transform": post}
    if with_base:
        attributes["base_values"] = [0.25] if len(labels) == 2 else [0.25, 0.5, -0.5]
    check(tmp_path, "TreeEnsembleClassifier", ROWS, [INT, FLOAT], **attributes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("track", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_branches_of_every_mode_have_the_answers_of_onnx_runtime(
    mode: str, track: int, dtype: type[np.floating[Any]], tmp_path: Path
) -> None:
    """Numbers of double precision are attributes of another kind."""
    attributes = trees("target", votes_of_all_leaves(*MIXED, classes=(0,)), mode, track)
    if dtype is np.float64:
        for name in ("nodes_values", "target_weights"):
            values = np.array(attributes.pop(name))
            attributes[f"{name}_as_tensor"] = numpy_helper.from_array(values, name)
    rows = ROWS.astype(dtype)
    check(tmp_path, "TreeEnsembleRegressor", rows, [FLOAT], n_targets=1, **attributes)


@pytest.mark.parametrize("post", POSTS)
@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_regressing_trees_have_the_answers_of_onnx_runtime(
    post: str, aggregate: str, outputs: int, tmp_path: Path
) -> None:
    votes = votes_of_all_leaves(*MIXED, classes=tuple(range(outputs)))
    attributes = trees("target", votes, "BRANCH_LT", 0)
    attributes |= {"n_targets": outputs, "base_values": [0.5, -0.25][:outputs]}
    attributes |= {"post_transform": post, "aggregate_function": aggregate}
    check(tmp_path, "TreeEnsembleRegressor", ROWS, [FLOAT], **attributes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes_modes": ["BRANCH_EQ", "LEAF", "LEAF"] * 2}, "BRANCH_EQ"),
        ({"aggregate_function": "MIN"}, "aggregate_function MIN"),
        ({"post_transform": "PROBIT"}, "post_transform PROBIT"),
    ],
)
def test_trees_that_cannot_be_read_are_refused(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    attributes = trees("target", votes_of_all_leaves(0.5, classes=(0,)), "BRANCH_LEQ", 0)
    attributes |= {"n_targets": 1} | changes
    file = write_node(tmp_path, "TreeEnsembleRegressor", ROWS, [FLOAT], **attributes)
    with pytest.raises(SourceError, match=re.escape(says)) as caught:
        as_torch(build_model(ModelSource(onnx=file)))
    assert "\n" not in str(caught.value)


def test_text_as_an_input_is_refused(tmp_path: Path) -> None:
    words = np.array([["a"]], object)
    encoder = {"keys_strings": ["a"], "values_int64s": [0]}
    file = write_node(tmp_path, "LabelEncoder", words, [INT], **encoder)
    with pytest.raises(SourceError, match="'x' is text"):
        build_model(ModelSource(onnx=file))
