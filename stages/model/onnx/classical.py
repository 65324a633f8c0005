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
    """A function of an operator's inputs, with constants by name."""

    def __init__(self, run: Callable[..., Any], **constants: Any) -> None:
        super().__init__()
        self.run = run
        for name, value in constants.items():
            self.register_buffer(name, torch.from_numpy(np.asarray(value)))

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(*inputs, **dict(self.named_buffers()))


def _floats(a: Node, name: str) -> npt.NDArray[Any]:
    """An attribute of floats; of doubles, if it is given so (`…_as_tensor`)."""
    doubles = a(f"{name}_as_tensor")
    return np.asarray(a(name, []), np.float32) if doubles is None else np.asarray(doubles)


def _scaler(a: Node) -> nn.Module:
    def run(x: Tensor, offset: Tensor, scale: Tensor) -> Tensor:
        return ((x - offset) * scale).float()

    return Operation(run, offset=_floats(a, "offset"), scale=_floats(a, "scale"))


def _normalizer(a: Node) -> nn.Module:
    """ai.onnx.ml.Normalizer: each row divided by its norm."""
    norm = a("norm", "MAX")

    def run(x: Tensor) -> Tensor:
        x = x.float()
        if norm == "L2":
            size = (x * x).sum(-1, keepdim=True)
            root = (x * x / size).sqrt()
            normed = torch.where(x < 0, -root, root)
        else:
            size = x.abs().sum(-1, keepdim=True) if norm == "L1" else x.amax(-1, keepdim=True)
            normed = x / size
        return torch.where(size == 0, x, normed)

    return Operation(run)


def _imputer(a: Node) -> nn.Module:
    """ai.onnx.ml.Imputer: numbers in place of missing ones."""
    ints = a("imputed_value_int64s")
    missing = a("replaced_value_int64", 0) if ints else a("replaced_value_float", 0.0)
    values = np.asarray(ints, np.int64) if ints else _floats(a, "imputed_value_floats")

    def run(x: Tensor, values: Tensor) -> Tensor:
        values = values if len(values) == x.shape[-1] else values[0]
        return torch.where(x.isnan() if np.isnan(missing) else x == missing, values, x)

    return Operation(run, values=values)


def _one_hot(a: Node) -> nn.Module:
    a("zeros")  # see `as_numbers`

    def run(x: Tensor, known: Tensor) -> Tensor:
        return (x.long().unsqueeze(-1) == known).float()

    return Operation(run, known=np.asarray(a("cats_int64s"), np.int64))


def _label_encoder(a: Node) -> nn.Module:
    """ai.onnx.ml.LabelEncoder: a value for each key."""

    def given(name: str) -> npt.NDArray[Any]:
        if (tensor := a(f"{name}_tensor")) is not None:
            return np.asarray(tensor).reshape(-1)
        ints = a(f"{name}_int64s")
        return _floats(a, f"{name}_floats") if ints is None else np.asarray(ints, np.int64)

    keys, values = given("keys"), given("values")
    keys, first = np.unique(keys, return_index=True)
    values = values[first]
    whole = values.dtype.kind == "i"
    other = a("default_int64", -1) if whole else a("default_float", -0.0)
    other = np.asarray(a("default_tensor", [other]), values.dtype).reshape(-1)

    def run(x: Tensor, keys: Tensor, values: Tensor, other: Tensor) -> Tensor:
        x = x.unsqueeze(-1)
        same = (x == keys) | (x.isnan() & keys.isnan())
        return torch.where(same.any(-1), torch.where(same, values, 0).sum(-1), other)

    return Operation(run, keys=keys, values=values, other=other)


def _extractor(a: Node) -> nn.Module:
    def run(x: Tensor, places: Tensor) -> Tensor:
        return (x.unsqueeze(0) if x.dim() == 1 else x)[..., places.reshape(-1)]

    return Operation(run)


def _vectorizer(a: Node) -> nn.Module:
    a("inputdimensions")
    return Operation(lambda *x: torch.cat([each.float().flatten(1) for each in x], 1))


def _binarizer(a: Node) -> nn.Module:
    threshold = a("threshold", 0.0)
    return Operation(lambda x: (x > threshold).to(x.dtype))


def _transformed(scores: Tensor, post: str) -> Tensor:
    """Scores of several classes, (n, K), after `post_transform`; one score stays as it is."""
    if post == "SOFTMAX" and scores.shape[1] > 1:
        return scores.softmax(1)
    return scores.sigmoid() if post == "LOGISTIC" and scores.shape[1] > 1 else scores


def _post(a: Node) -> str:
    post: str = a("post_transform", "NONE")
    if post not in ("NONE", "LOGISTIC", "SOFTMAX"):
        raise ValueError(f"post_transform {post} is not known here")
    return post


class Classifier(nn.Module):
    """Labels (n,) and scores (n, K) of the raw scores of `raw`: (n, K), or (n, 1) for two classes.

    `limit`: the second of two classes is chosen where its raw score, the last, is above it; None:
    the class of the largest raw score is. `unit`: whether one raw score is a probability.
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
            return labels, _transformed(raw, self.post)
        if self.post == "LOGISTIC":
            return labels, torch.cat([-raw, raw], 1).sigmoid()
        return labels, torch.cat([1 - raw if self.unit else -raw, raw], 1)


def _linear(a: Node, outputs: int) -> nn.Module:
    weights = _floats(a, "coefficients").reshape(outputs, -1)
    bias = _floats(a, "intercepts")
    return Operation(
        lambda x, weights, bias: F.linear(x.float(), weights, bias),
        weights=weights,
        bias=bias if len(bias) else np.zeros(outputs, np.float32),
    )


def _linear_regressor(a: Node) -> nn.Module:
    post = _post(a)
    return nn.Sequential(
        _linear(a, a("targets", 1)), Operation(lambda scores: _transformed(scores, post))
    )


def _linear_classifier(a: Node) -> nn.Module:
    """ai.onnx.ml.LinearClassifier. One score alone is compared with 0."""
    a("multi_class")  # not used; `Node.check` refuses an attribute that was not read
    scores = len(_floats(a, "intercepts"))
    limit = 0.0 if scores == 1 else None
    return Classifier(_linear(a, scores), a("classlabels_ints"), _post(a), limit, unit=True)


class Scores(nn.Module):
    """The sums of an ensemble's leaves: (n, F) -> (n, K)."""

    def __init__(self, trees: Trees) -> None:
        super().__init__()
        self.trees = trees

    def forward(self, x: Tensor) -> Tensor:
        sums: Tensor = self.trees(x[:, : self.trees.features])
        return (sums if sums.dim() > 1 else sums.unsqueeze(1)).float()


def _tree_regressor(a: Node) -> nn.Module:
    post, average = _post(a), a("aggregate_function", "SUM")
    if average not in ("SUM", "AVERAGE"):
        raise ValueError(f"aggregate_function {average} is not known here")
    outputs = a("n_targets", 1)
    base = _floats(a, "base_values")
    scores = Scores(_trees(a, "target", outputs, base, average == "AVERAGE"))
    return nn.Sequential(scores, Operation(lambda scores: _transformed(scores, post)))


def _tree_classifier(a: Node) -> nn.Module:
    """ai.onnx.ml.TreeEnsembleClassifier, with ONNX Runtime's rules for two classes."""
    labels, post, base = a("classlabels_int64s"), _post(a), _floats(a, "base_values")
    if len(labels) != 2:
        return Classifier(Scores(_trees(a, "class", len(labels), base)), labels, post, None, False)
    if len(base) > 1:
        raise ValueError("base_values of both of two classes are not known here")
    voted, positive = {*a("class_ids")}, bool((_floats(a, "class_weights") >= 0).all())
    if voted == {0, 1}:  # ONNX Runtime then gives 0 and 1, whatever the labels are
        labels, limit = [0, 1], 0.0
    else:
        limit = 0.5 if positive else 0.0
    outputs = 1 if voted == {0} else 2
    base = np.append(base, 0)[:outputs] if len(base) else base
    base = base if voted != {1} else base[:0]
    return Classifier(Scores(_trees(a, "class", outputs, base)), labels, post, limit, positive)


class _Nodes(NamedTuple):
    """All nodes of an ensemble: the positions of each tree's nodes, the position of a node by the
    numbers of its tree and itself, and the trees' data by position, without values."""

    trees: dict[int, npt.NDArray[Any]]
    place: dict[tuple[int, int], int]
    below: npt.NDArray[Any]
    feature: npt.NDArray[Any]
    threshold: npt.NDArray[Any]
    missing_left: npt.NDArray[Any]


def _nodes(a: Node) -> _Nodes:
    """The nodes of an ensemble. Raises ValueError for branches that are not known here."""
    a("nodes_hitrates"), a("nodes_hitrates_as_tensor")
    ids = np.asarray(a("nodes_treeids"))
    place = {at: i for i, at in enumerate(zip(ids.tolist(), a("nodes_nodeids"), strict=True))}
    modes = np.array([mode.decode() for mode in a("nodes_modes")])
    if odd := {*modes.tolist()} - {*_BRANCHES, "LEAF"}:
        raise ValueError(f"{', '.join(sorted(odd))} is not known here: train on numbers")
    # All branches become `x < threshold`; where it is their opposite, the children change places.
    threshold = _floats(a, "nodes_values")
    above = np.nextafter(threshold, threshold.dtype.type(np.inf))
    leaf, turned = modes == "LEAF", np.isin(modes, ["BRANCH_GT", "BRANCH_GTE"])
    threshold = np.where(np.isin(modes, ["BRANCH_LEQ", "BRANCH_GT"]), above, threshold)
    missing = np.asarray(a("nodes_missing_value_tracks_true", np.zeros(len(ids)))) != turned
    yes, no = (
        np.array([place.get(at, 0) for at in zip(ids.tolist(), a(name), strict=True)])
        for name in ("nodes_truenodeids", "nodes_falsenodeids")
    )
    below = np.stack([np.where(turned, no, yes), np.where(turned, yes, no)], axis=1)
    below = np.where(leaf[:, None], np.arange(len(ids))[:, None], below)
    feature = np.where(leaf, 0, a("nodes_featureids"))
    trees = {tree: np.flatnonzero(ids == tree) for tree in dict.fromkeys(ids.tolist())}
    return _Nodes(trees, place, below, feature, np.where(leaf, 0, threshold), missing)


def _trees(
    a: Node, kind: str, outputs: int, base: npt.NDArray[Any], average: bool = False
) -> Trees:
    """The trees of a node whose leaves have `class_…` or `target_…` weights. Raises ValueError."""
    nodes = _nodes(a)
    voting = [*zip(a(f"{kind}_treeids"), a(f"{kind}_nodeids"), strict=True)]
    weights, voted = _floats(a, f"{kind}_weights"), np.asarray(a(f"{kind}_ids"))
    value = np.zeros((len(nodes.below), outputs), weights.dtype)
    np.add.at(value, (np.array([nodes.place[at] for at in voting]), voted), weights)
    pairs = {*zip((tree for tree, _ in voting), voted.tolist(), strict=True)}
    of_tree = dict(pairs)
    order = [of_tree.get(tree, 0) for tree in nodes.trees]
    # Boosting makes a tree for each class. Other trees have a value for each class in a leaf.
    single = len(pairs) == len(order) and len({order.count(i) for i in range(outputs)}) == 1
    trees = []
    for tree, its in nodes.trees.items():
        own = value[its, of_tree[tree]] if single else value[its]
        local = np.searchsorted(its, nodes.below[its])
        feature, threshold = nodes.feature[its], nodes.threshold[its]
        trees.append(Tree(local, feature, threshold, nodes.missing_left[its], own))
    scale = 1 / len(trees) if average else 1.0
    base = base / scale if len(base) == outputs else np.zeros(outputs)
    features = int(nodes.feature.max()) + 1
    order = order if single else [0] * len(trees)
    return Trees(trees, order, base=base, features=features, names=(), link="identity", scale=scale)


CLASSICAL: dict[str, Callable[[Node], nn.Module]] = {
    "Scaler": _scaler, "Normalizer": _normalizer, "Imputer": _imputer, "OneHotEncoder": _one_hot,
    "LabelEncoder": _label_encoder, "ArrayFeatureExtractor": _extractor,
    "FeatureVectorizer": _vectorizer, "Binarizer": _binarizer,
    "LinearRegressor": _linear_regressor, "LinearClassifier": _linear_classifier,
    "TreeEnsembleRegressor": _tree_regressor, "TreeEnsembleClassifier": _tree_classifier,
}  # fmt: skip
