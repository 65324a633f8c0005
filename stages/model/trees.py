"""Boosted trees of XGBoost and LightGBM, from their own files, as one torch module.

If the trees have few levels, all nodes are evaluated for all rows and trees at once: whole columns
are compared, and from the leaves up each node takes the value of one child. In deeper trees every
row goes down all trees at once, one level per step. The rule by which a row goes left or right is
each library's own:
`GetNextNode` of xgboost's src/predictor/predict_fn.h (float32, x < threshold),
`NumericalDecision` of LightGBM's include/LightGBM/tree.h (float64, x <= threshold).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engines.errors import first_line
from soa.files import read_plain
from soa.records import parse_json
from stages.errors import CaptureError, SourceError

Array = npt.NDArray[Any]

# The function that a library applies to its sums of leaves, and the objectives that use it.
# `binary:logitraw` is left out: the meaning of its base_score depends on xgboost's version.
_LINKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, dim=1),
    "argmax": lambda x: x.argmax(dim=1, keepdim=True).to(x.dtype),
    "exp": torch.exp,
    "step": lambda x: (x > 0).to(x.dtype),
    "log1p_exp": lambda x: torch.log1p(torch.exp(x)),
    "signed_square": lambda x: torch.sign(x) * x * x,
}
_OBJECTIVES = {
    "identity": "reg:squarederror reg:linear reg:squaredlogerror reg:pseudohubererror rank:map "
    "reg:absoluteerror rank:pairwise rank:ndcg regression regression_l1 huber fair quantile mape "
    "lambdarank rank_xendcg custom",
    "sigmoid": "binary:logistic reg:logistic binary multiclassova cross_entropy",
    "softmax": "multi:softprob multiclass",
    "argmax": "multi:softmax",
    "exp": "count:poisson reg:gamma reg:tweedie survival:cox survival:aft poisson gamma tweedie",
    "step": "binary:hinge",
    "log1p_exp": "cross_entropy_lambda",
    "signed_square": "regression-sqrt",
}
_LINK_OF = {objective: link for link, all in _OBJECTIVES.items() for objective in all.split()}
_FEW_LEVELS = 6
_ZERO = float(np.float32(1e-35))  # LightGBM takes a value up to this for 0
_CATEGORIES = "categorical splits are not known here: train on numbers, or one-hot"


class Tree(NamedTuple):
    """The N nodes of a tree, the root first. `children` is (N, 2); a leaf is its own child.

    `missing_left`: whether a row whose feature is NaN goes left. `value` is the value of a leaf,
    (N,), or its V values, (N, V).
    """

    children: Array
    feature: Array
    threshold: Array
    missing_left: Array
    value: Array


class Trees(torch.nn.Module):
    """(n, F) -> (n,), or (n, K) for K outputs, as the library's Booster predicts with all trees.

    `outputs[i]` is the output that tree i adds to; 0, if a leaf has a value for each output. Sums
    begin at `base`, (K,). The thresholds are float32 or float64, and so rows become. NaN is a
    missing value. `names` are the names of the features in the model's order, if the file has them.
    `zero` is used by LightGBM only: the value that replaces a zero, 0 or NaN. Raises ValueError if
    the data are no trees.
    """

    missing = True
    below: torch.Tensor
    feature: torch.Tensor
    threshold: torch.Tensor
    value: torch.Tensor
    roots: torch.Tensor
    base: torch.Tensor

    def __init__(
        self,
        trees: Sequence[Tree],
        outputs: Sequence[int],
        base: Array,
        features: int,
        names: tuple[str, ...],
        link: str,
        scale: float = 1.0,
        zero: float | None = None,
    ) -> None:
        super().__init__()
        if not trees:
            raise ValueError("there is no tree in it")
        self.features, self.names, self.link = features, names, link
        self.scale, self.zero = scale, zero
        children, feature, threshold, missing_left, value = map(
            np.concatenate, zip(*trees, strict=True)
        )
        counts = np.array([len(tree.value) for tree in trees])
        starts, most = np.cumsum(counts) - counts, np.repeat(counts, counts)[:, None]
        inside = ((children >= 0) & (children < most)).all(axis=1)
        if not (inside & (feature >= 0) & (feature < features)).all():
            raise ValueError("a node names a child or a feature that is not there")
        if not (threshold > -np.inf).all():
            raise ValueError("a threshold is NaN or -inf")
        order = np.argsort(outputs, kind="stable")  # put the trees of one output side by side
        groups = len(base) // math.prod(value.shape[1:])
        each = np.repeat(np.arange(groups), len(trees) // groups)
        if not np.array_equal(np.asarray(outputs)[order], each):
            raise ValueError("its outputs have different numbers of trees")
        below, roots = children + np.repeat(starts, counts)[:, None], starts[order]
        at, self.depth = roots, 0  # the depth counts the steps until every row is in a leaf
        while (below[at] != at[:, None]).any():
            at, self.depth = np.unique(below[at]), self.depth + 1
            if self.depth > counts.max():
                raise ValueError("the nodes of a tree go in a circle")
        feature = feature + features * (missing_left != 0)  # indices of the columns in `forward`
        if self.depth <= _FEW_LEVELS:  # (nodes of a full tree, trees)
            levels = [roots[None]]
            for _ in range(self.depth):
                levels.append(below[levels[-1]].swapaxes(1, 2).reshape(-1, len(trees)))
            inner = np.concatenate([np.zeros((0, len(trees)), int), *levels[:-1]])
            feature, threshold, value = feature[inner], threshold[inner], value[levels[-1]]
        self.groups = groups
        real = threshold.dtype
        for name, array, dtype in (
            ("below", below.reshape(-1), np.int64),
            ("feature", feature, np.int64),
            ("threshold", threshold, real),
            ("value", value, real),
            ("roots", roots, np.int64),
            ("base", base, np.float64),
        ):
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(array, dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2 or x.shape[1] != self.features:
            shape = ", ".join(map(str, x.shape[1:]))
            raise CaptureError(f"the trees take (n, {self.features}); the block is (n, {shape})")
        x = x.to(self.threshold.dtype)
        if self.zero is not None:
            x = torch.where(x.abs() <= _ZERO, self.zero, x)
        # A missing value is above all thresholds; for nodes where it goes left, below all of them.
        x, missing = x.t(), x.t().isnan()
        x = torch.cat([torch.where(missing, side, x) for side in (torch.inf, -torch.inf)])
        few = self.depth <= _FEW_LEVELS
        leaf = self._picked(x, 0) if few else self._reached(x.t()).movedim(0, -1)
        # Sums are in float64, which is closer to the exact sum than xgboost's float32.
        sums = leaf.unflatten(0, (self.groups, -1)).sum(dim=1, dtype=torch.float64)
        sums = sums.flatten(0, -2).t()
        found = _LINKS[self.link](((sums + self.base) * self.scale).to(x.dtype))
        return found.squeeze(1) if found.shape[1] == 1 else found

    def _picked(self, x: torch.Tensor, node: int) -> torch.Tensor:
        """(2F, n) -> (trees, n), or (trees, V, n): the leaf below a node of each full tree."""
        inner = len(self.feature)
        if node >= inner:
            value = self.value[node - inner]
            return value.unsqueeze(-1).expand(*value.shape, x.shape[1])
        left = self._left(x[self.feature[node]], self.threshold[node].unsqueeze(1))
        left = left if self.value.dim() == 2 else left.unsqueeze(1)
        return torch.where(left, self._picked(x, 2 * node + 1), self._picked(x, 2 * node + 2))

    def _reached(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 2F) -> (n, trees), or (n, trees, V), down the levels from the roots."""
        at = self.roots.expand(x.shape[0], -1)
        for _ in range(self.depth):
            left = self._left(x.gather(1, self.feature[at]), self.threshold[at])
            at = self.below[2 * at + (~left).to(at.dtype)]
        return self.value[at]

    def _left(self, value: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
        return value < threshold if self.zero is None else value <= threshold


def load_trees(path: Path) -> Trees:
    """The trees in a file of XGBoost (.json, .ubj) or LightGBM (.txt). Raises SourceError."""
    try:
        content: bytes | bytearray = read_plain(path, links=True, largest=None)
        if path.suffix == ".txt":
            return _lightgbm(content.decode())
        if path.suffix == ".ubj":
            import xgboost  # it reads its own binary form

            content = xgboost.Booster(model_file=path).save_raw("json")
        elif path.suffix != ".json":
            raise ValueError("a file of XGBoost ends in .json or .ubj, one of LightGBM in .txt")
        return _xgboost(parse_json(bytes(content)))
    except ImportError as error:
        raise SourceError(
            f"{path} is read by xgboost, which cannot be imported ({error}): pip install xgboost, "
            "or save the model as .json"
        ) from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        said = f"there is no {error}" if isinstance(error, KeyError) else first_line(error)
        raise SourceError(f"{path} holds no boosted trees that are known here: {said}") from error


def _xgboost(document: Any) -> Trees:
    """Trees from the data that `Booster.save_model` writes, xgboost 1.0 to 3.4."""
    if "oblivious_trees" in document:
        raise ValueError(
            "it is CatBoost's: catboost.CatBoost().load_model(FILE, format='json')"
            ".save_model('trees.onnx', format='onnx'), then give trees.onnx"
        )
    learner = document["learner"]
    booster = learner["gradient_booster"]
    if booster["name"] == "gblinear":
        raise ValueError("booster gblinear has no trees")
    model = booster.get("gbtree", booster)["model"]  # in older dart files: one level deeper
    drop = booster.get("weight_drop") or model.get("weight_drop") or [1.0] * len(model["trees"])
    trees = []
    for tree, weight in zip(model["trees"], drop, strict=True):
        if np.any(tree.get("split_type", 0)):
            raise ValueError(_CATEGORIES)
        if int(tree["tree_param"]["size_leaf_vector"]) > 1:
            raise ValueError("leaves of vectors (multi_output_tree) are not known here")
        below = np.stack([tree["left_children"], tree["right_children"]], axis=1)
        leaf = below < 0
        value = np.asarray(tree["split_conditions"], np.float32)
        below = np.where(leaf, np.arange(len(leaf))[:, None], below)
        feature = np.where(leaf[:, 0], 0, tree["split_indices"])
        missing_left = np.asarray(tree["default_left"])
        trees.append(Tree(below, feature, value, missing_left, value * np.float32(weight)))
    link = _link_of(learner["objective"]["name"])
    param = learner["learner_model_param"]
    outputs = max(int(param["num_class"]), int(param.get("num_target", 1)), 1)
    # Before 3.1 there is one value for all outputs. The link function is already applied to it.
    base = np.asarray(param["base_score"].strip("[]").split(","), np.float32)
    base = -np.log(1 / base - 1) if link == "sigmoid" else np.log(base) if link == "exp" else base
    names = tuple(learner.get("feature_names") or ())
    base, features = np.broadcast_to(base, outputs), int(param["num_feature"])
    return Trees(trees, model["tree_info"], base, features, names, link)


def _lightgbm(text: str) -> Trees:
    """Trees from the text that `Booster.save_model` writes, LightGBM 3 and 4."""
    head, *parts = re.split(r"^Tree=\d+$", text.partition("\nend of trees")[0], flags=re.MULTILINE)
    header = _fields(head)
    outputs, features = int(header["num_tree_per_iteration"]), int(header["max_feature_idx"]) + 1
    objective, *options = header.get("objective", "custom").split()
    link = _link_of("regression-sqrt" if "sqrt" in options else objective)
    scale = next((float(o.partition(":")[2]) for o in options if o.startswith("sigmoid:")), 1.0)
    trees, zeros, mixed = [], False, False
    for fields in map(_fields, parts):
        if int(fields.get("is_linear", 0)):
            raise ValueError("linear trees (linear_tree) are not known here")
        names = ("split_feature", "left_child", "right_child", "decision_type")
        feature, left, right, decision = (_read(fields, name, int) for name in names)
        threshold, leaves = (_read(fields, name, float) for name in ("threshold", "leaf_value"))
        if (decision & 1).any():
            raise ValueError(_CATEGORIES)
        # The missing type of a node: none (0: NaN is taken for 0), zero (1) or NaN (2).
        missing, default, zero_left = (decision >> 2) & 3, (decision & 2) > 0, threshold >= 0
        zeros = zeros or 1 in missing
        mixed = mixed or ((missing == 2) & (default != zero_left)).any()
        inner, pad = len(feature), np.zeros_like(leaves)
        own = np.arange(inner, inner + len(leaves))
        below = np.stack([np.append(left, own), np.append(right, own)], axis=1)
        below = np.where(below < 0, inner + ~below, below)  # leaves have the numbers ~0, ~1, …
        goes_left = np.append(np.where(missing == 0, zero_left, default), pad)
        feature, threshold = np.append(feature, pad).astype(int), np.append(threshold, pad)
        trees.append(Tree(below, feature, threshold, goes_left, np.append(0 * left, leaves)))
    if zeros and mixed:
        raise ValueError("zero is a missing value (zero_as_missing) in some nodes only")
    if "average_output" in header:
        scale /= len(trees) // outputs
    known = tuple(header["feature_names"].split(" "))
    order, zero = [i % outputs for i in range(len(trees))], np.nan if zeros else 0.0
    return Trees(trees, order, np.zeros(outputs), features, known, link, scale, zero)


def _read(fields: dict[str, str], name: str, kind: type) -> Array:
    return np.array(fields.get(name, "").split(), kind)


def _fields(text: str) -> dict[str, str]:
    return {key: value for key, _, value in (line.partition("=") for line in text.splitlines())}


def _link_of(objective: str) -> str:
    if objective not in _LINK_OF:
        raise ValueError(f"objective {objective!r} is none of {', '.join(_LINK_OF)}")
    return _LINK_OF[objective]
