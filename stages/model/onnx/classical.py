"""The operators of `ai.onnx.ml`, which converters of scikit-learn and of boosted trees write.

Each becomes a module, built once from its node. Where the specification leaves a rule open, it is
that of ONNX Runtime's kernels (onnxruntime/core/providers/cpu/ml).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.model.onnx.operators import Node
from stages.model.trees import Tree, Trees

_BRANCHES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GT", "BRANCH_GTE")


class Operation(nn.Module):
    """A module that calls `run` with its inputs, and with the constants by name."""

    def __init__(self, run: Callable[..., Any], **constants: Any) -> None:
        super().__init__()
        self.run = run
        for name, value in constants.items():
            self.register_buffer(name, torch.from_numpy(np.asarray(value)))

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(*inputs, **dict(self.named_buffers()))


def _read_floats(node: Node, name: str) -> npt.NDArray[Any]:
    """The attribute `name` as float32; as float64 if the node has `name_as_tensor` instead. Empty
    if it has none of them."""
    doubles = node(f"{name}_as_tensor")
    return np.asarray(node(name, []), np.float32) if doubles is None else np.asarray(doubles)


def _scaler(node: Node) -> nn.Module:
    """ai.onnx.ml.Scaler: (x - offset) * scale."""

    def run(x: Tensor, offset: Tensor, scale: Tensor) -> Tensor:
        return ((x - offset) * scale).float()

    return Operation(run, offset=_read_floats(node, "offset"), scale=_read_floats(node, "scale"))


def _normalizer(node: Node) -> nn.Module:
    """ai.onnx.ml.Normalizer: each row divided by its norm."""
    norm = node("norm", "MAX")

    def run(x: Tensor) -> Tensor:
        x = x.float()
        if norm == "L2":
            size = (x * x).sum(-1, keepdim=True)  # ONNX Runtime takes the root of the quotient
            root = (x * x / size).sqrt()
            normed = torch.where(x < 0, -root, root)
        else:
            size = x.abs().sum(-1, keepdim=True) if norm == "L1" else x.amax(-1, keepdim=True)
            normed = x / size
        return torch.where(size == 0, x, normed)

    return Operation(run)


def _imputer(node: Node) -> nn.Module:
    """ai.onnx.ml.Imputer: numbers in place of missing ones."""
    ints = node("imputed_value_int64s")
    missing = node("replaced_value_int64", 0) if ints else node("replaced_value_float", 0.0)
    values = np.asarray(ints, np.int64) if ints else _read_floats(node, "imputed_value_floats")

    def run(x: Tensor, values: Tensor) -> Tensor:
        values = values if len(values) == x.shape[-1] else values[0]
        return torch.where(x.isnan() if np.isnan(missing) else x == missing, values, x)

    return Operation(run, values=values)


def _one_hot(node: Node) -> nn.Module:
    """ai.onnx.ml.OneHotEncoder of numbers: zeros for a category that is not known."""
    # `replace_text_and_maps` sets it; `Node.check` refuses an attribute that was not read.
    node("zeros")

    def run(x: Tensor, known: Tensor) -> Tensor:
        return (x.long().unsqueeze(-1) == known).float()

    return Operation(run, known=np.asarray(node("cats_int64s"), np.int64))


def _label_encoder(node: Node) -> nn.Module:
    """ai.onnx.ml.LabelEncoder: a value for each key."""

    def numbers(name: str) -> npt.NDArray[Any]:
        if (tensor := node(f"{name}_tensor")) is not None:
            return np.asarray(tensor).reshape(-1)
        ints = node(f"{name}_int64s")
        return _read_floats(node, f"{name}_floats") if ints is None else np.asarray(ints, np.int64)

    # Of equal keys the first counts.
    keys, first_places = np.unique(numbers("keys"), return_index=True)
    values = numbers("values")[first_places]
    is_integer = values.dtype.kind == "i"
    default = node("default_int64", -1) if is_integer else node("default_float", -0.0)
    other = np.asarray(node("default_tensor", [default]), values.dtype).reshape(-1)

    def run(x: Tensor, keys: Tensor, values: Tensor, other: Tensor) -> Tensor:
        x = x.unsqueeze(-1)
        same = (x == keys) | (x.isnan() & keys.isnan())  # true for one key at most
        return torch.where(same.any(-1), torch.where(same, values, 0).sum(-1), other)

    return Operation(run, keys=keys, values=values, other=other)


def _extractor(node: Node) -> nn.Module:
    """ai.onnx.ml.ArrayFeatureExtractor: the columns with these indices."""

    def run(x: Tensor, indices: Tensor) -> Tensor:
        matrix = x.unsqueeze(0) if x.dim() == 1 else x
        return matrix[..., indices.reshape(-1)]

    return Operation(run)


def _vectorizer(node: Node) -> nn.Module:
    """ai.onnx.ml.FeatureVectorizer: all inputs side by side, as float32."""
    node("inputdimensions")  # not used; `Node.check` refuses an attribute that was not read
    return Operation(lambda *inputs: torch.cat([x.float().flatten(1) for x in inputs], 1))


def _binarizer(node: Node) -> nn.Module:
    """ai.onnx.ml.Binarizer: 1 above the threshold, else 0."""
    threshold = node("threshold", 0.0)
    return Operation(lambda x: (x > threshold).to(x.dtype))


def _transform(scores: Tensor, post: str) -> Tensor:
    """Apply the function named `post` to the scores of several classes, (n, K). One score alone is
    returned as it is."""
    if post == "NONE" or scores.shape[1] == 1:
        return scores
    return scores.softmax(1) if post == "SOFTMAX" else scores.sigmoid()


def _read_post_transform(node: Node) -> str:
    """Read a node's `post_transform`, the name of the function of the scores. Raises ValueError for
    one that is not known here."""
    post: str = node("post_transform", "NONE")
    if post not in ("NONE", "LOGISTIC", "SOFTMAX"):
        raise ValueError(f"post_transform {post} is not known here")
    return post


class Classifier(nn.Module):
    """Returns labels, (n,), and scores, (n, K), from the raw scores that the module `raw` computes:
    (n, K), or (n, 1) for two classes.

    If `limit` is None, the class with the largest raw score is chosen. Else there are two classes,
    and the second one is chosen where the last raw score is above `limit`. `labels` are the
    classes' numbers, `post` the function of the scores. `unit`: one raw score alone is a
    probability.
    """

    labels: Tensor

    def __init__(
        self, raw: nn.Module, labels: Any, post: str, limit: float | None, unit: bool
    ) -> None:
        super().__init__()
        self.raw, self.post, self.limit, self.unit = raw, post, limit, unit
        self.register_buffer("labels", torch.tensor(labels))
        self.plain = [*labels] == [*range(len(labels))]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raw = self.raw(x)
        chosen = raw.argmax(1) if self.limit is None else (raw[:, -1] > self.limit).long()
        labels = chosen if self.plain else self.labels[chosen]
        if raw.shape[1] > 1:
            return labels, _transform(raw, self.post)
        if self.post == "LOGISTIC":
            return labels, torch.cat([-raw, raw], 1).sigmoid()
        return labels, torch.cat([1 - raw if self.unit else -raw, raw], 1)


def _linear_layer(node: Node, outputs: int) -> nn.Module:
    """A linear layer with a node's coefficients and intercepts: (n, F) -> (n, outputs). Without
    intercepts the bias is 0."""
    weights = _read_floats(node, "coefficients").reshape(outputs, -1)
    bias = _read_floats(node, "intercepts")
    return Operation(
        lambda x, weights, bias: F.linear(x.float(), weights, bias),
        weights=weights,
        bias=bias if len(bias) else np.zeros(outputs, np.float32),
    )


def _linear_regressor(node: Node) -> nn.Module:
    """ai.onnx.ml.LinearRegressor: a linear layer, and the function of its scores."""
    post = _read_post_transform(node)
    return nn.Sequential(
        _linear_layer(node, node("targets", 1)), Operation(lambda scores: _transform(scores, post))
    )


def _linear_classifier(node: Node) -> nn.Module:
    """ai.onnx.ml.LinearClassifier: the class with the largest score. If there is one score for two
    classes, it is compared with 0."""
    node("multi_class")  # not used; `Node.check` refuses an attribute that was not read
    scores = len(_read_floats(node, "intercepts"))
    limit = 0.0 if scores == 1 else None
    labels, post = node("classlabels_ints"), _read_post_transform(node)
    return Classifier(_linear_layer(node, scores), labels, post, limit, unit=True)


class Scores(nn.Module):
    """The sums of an ensemble's leaves, always as a float32 matrix: (n, F) -> (n, K). The rows may
    have more features than the trees use."""

    def __init__(self, trees: Trees) -> None:
        super().__init__()
        self.trees = trees

    def forward(self, x: Tensor) -> Tensor:
        sums: Tensor = self.trees(x[:, : self.trees.features])
        return (sums if sums.dim() > 1 else sums.unsqueeze(1)).float()


def _tree_regressor(node: Node) -> nn.Module:
    """ai.onnx.ml.TreeEnsembleRegressor: the sum, or the mean, over the trees."""
    post, aggregate = _read_post_transform(node), node("aggregate_function", "SUM")
    if aggregate not in ("SUM", "AVERAGE"):
        raise ValueError(f"aggregate_function {aggregate} is not known here")
    outputs = node("n_targets", 1)
    base = _read_floats(node, "base_values")
    scores = Scores(_read_trees(node, "target", outputs, base, average=aggregate == "AVERAGE"))
    return nn.Sequential(scores, Operation(lambda scores: _transform(scores, post)))


def _tree_classifier(node: Node) -> nn.Module:
    """ai.onnx.ml.TreeEnsembleClassifier, with ONNX Runtime's rules for two classes.

    Two classes may have one score: then the leaves vote for one class only. Such a score is a
    probability if no leaf has a negative weight.
    """
    labels, post = node("classlabels_int64s"), _read_post_transform(node)
    base = _read_floats(node, "base_values")
    if len(labels) != 2:
        scores = Scores(_read_trees(node, "class", len(labels), base))
        return Classifier(scores, labels, post, limit=None, unit=False)
    if len(base) > 1:
        raise ValueError("base_values of both of two classes are not known here")
    voted = {*node("class_ids")}
    unit = bool((_read_floats(node, "class_weights") >= 0).all())
    limit = 0.5 if unit else 0.0
    if voted == {0, 1}:  # ONNX Runtime then gives 0 and 1, whatever the labels are
        labels, limit = [0, 1], 0.0
    outputs = 1 if voted == {0} else 2
    if voted == {1}:
        base = base[:0]  # ONNX Runtime adds none
    elif len(base):
        base = np.append(base, 0)[:outputs]  # it belongs to the first class
    scores = Scores(_read_trees(node, "class", outputs, base))
    return Classifier(scores, labels, post, limit, unit)


class _Nodes(NamedTuple):
    """All N nodes of an ensemble, in the order of the file. A position is an index in this order.

    `trees` has the positions of each tree's nodes, by the number of the tree. `position` has the
    position of a node, by the numbers of the tree and of the node in it. `below`, (N, 2), has the
    positions of a node's children; a leaf is its own child. The rest is as in `Tree`.
    """

    trees: dict[int, npt.NDArray[Any]]
    position: dict[tuple[int, int], int]
    below: npt.NDArray[Any]
    feature: npt.NDArray[Any]
    threshold: npt.NDArray[Any]
    missing_left: npt.NDArray[Any]


def _read_nodes(node: Node) -> _Nodes:
    """Read the nodes of an ensemble from the attributes of its ONNX node. All branches become
    `x < threshold`. Raises ValueError for a kind of branch that is not known here."""
    for unused in ("nodes_hitrates", "nodes_hitrates_as_tensor"):
        node(unused)  # `Node.check` refuses an attribute that was not read
    tree_ids = np.asarray(node("nodes_treeids"))
    tree_of_node = tree_ids.tolist()
    position = {
        key: i for i, key in enumerate(zip(tree_of_node, node("nodes_nodeids"), strict=True))
    }
    modes = np.array([mode.decode() for mode in node("nodes_modes")])
    if unknown := {*modes.tolist()} - {*_BRANCHES, "LEAF"}:
        raise ValueError(f"{', '.join(sorted(unknown))} is not known here: train on numbers")
    # All branches become `x < threshold`; where it is their opposite, the children change places.
    # x <= threshold is x < the next larger number. x <= inf is the opposite of x < -inf.
    threshold = _read_floats(node, "nodes_values")
    with np.errstate(over="ignore"):
        next_larger = np.nextafter(threshold, threshold.dtype.type(np.inf))
    leaf, opposite = modes == "LEAF", np.isin(modes, ["BRANCH_GT", "BRANCH_GTE"])
    with_equal = np.isin(modes, ["BRANCH_LEQ", "BRANCH_GT"])
    every_number = with_equal & (threshold == np.inf)
    opposite ^= every_number
    threshold = np.where(with_equal, np.where(every_number, -np.inf, next_larger), threshold)
    missing_true = np.asarray(node("nodes_missing_value_tracks_true", np.zeros(len(tree_of_node))))
    if_true, if_false = (  # what a leaf names is not used, and may be absent
        np.array([position.get(key, 0) for key in zip(tree_of_node, node(name), strict=True)])
        for name in ("nodes_truenodeids", "nodes_falsenodeids")
    )
    children = np.stack(
        [np.where(opposite, if_false, if_true), np.where(opposite, if_true, if_false)], axis=1
    )
    return _Nodes(
        trees={tree: np.flatnonzero(tree_ids == tree) for tree in dict.fromkeys(tree_of_node)},
        position=position,
        below=np.where(leaf[:, None], np.arange(len(tree_of_node))[:, None], children),
        feature=np.where(leaf, 0, node("nodes_featureids")),
        threshold=np.where(leaf, 0, threshold),
        missing_left=missing_true != opposite,
    )


def _read_trees(
    node: Node, kind: str, outputs: int, base: npt.NDArray[Any], average: bool = False
) -> Trees:
    """Read the trees of an ensemble from the attributes of its ONNX node.

    `kind` is the prefix of the attributes with the values of leaves, "class" or "target". `base`
    are the values to which the trees are added, `(outputs,)` or empty. With `average` the mean over
    the trees is taken, not the sum. Raises ValueError if the attributes are no trees.
    """
    nodes = _read_nodes(node)
    tree_of_weight = node(f"{kind}_treeids")
    leaves = zip(tree_of_weight, node(f"{kind}_nodeids"), strict=True)
    weights, output = _read_floats(node, f"{kind}_weights"), np.asarray(node(f"{kind}_ids"))
    value = np.zeros((len(nodes.below), outputs), weights.dtype)
    np.add.at(value, (np.array([nodes.position[leaf] for leaf in leaves]), output), weights)
    pairs = {*zip(tree_of_weight, output.tolist(), strict=True)}
    output_of_tree = dict(pairs)
    order = [output_of_tree.get(tree, 0) for tree in nodes.trees]
    # Boosting makes trees that are of one class each, as many for each class. In a forest a leaf
    # has a value for each class.
    boosted = len(pairs) == len(order) and len({order.count(i) for i in range(outputs)}) == 1
    trees = [
        Tree(
            children=np.searchsorted(positions, nodes.below[positions]),
            feature=nodes.feature[positions],
            threshold=nodes.threshold[positions],
            missing_left=nodes.missing_left[positions],
            value=value[positions, output_of_tree[tree]] if boosted else value[positions],
        )
        for tree, positions in nodes.trees.items()
    ]
    scale = 1 / len(trees) if average else 1.0
    # `Trees` scales the base too.
    base = base / scale if len(base) == outputs else np.zeros(outputs)
    features = int(nodes.feature.max()) + 1
    order = order if boosted else [0] * len(trees)
    return Trees(trees, order, base=base, features=features, names=(), link="identity", scale=scale)


CLASSICAL: dict[str, Callable[[Node], nn.Module]] = {
    "Scaler": _scaler, "Normalizer": _normalizer, "Imputer": _imputer, "OneHotEncoder": _one_hot,
    "LabelEncoder": _label_encoder, "ArrayFeatureExtractor": _extractor,
    "FeatureVectorizer": _vectorizer, "Binarizer": _binarizer,
    "LinearRegressor": _linear_regressor, "LinearClassifier": _linear_classifier,
    "TreeEnsembleRegressor": _tree_regressor, "TreeEnsembleClassifier": _tree_classifier,
}  # fmt: skip
