"""Boosted trees of XGBoost and LightGBM, from their own files, as one torch module.

A row goes down all trees at once, one level per step; `lanes` has faster code for it. The rule by
which a row goes left or right is each library's own:
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
from engines.exported import descend_trees
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
    """Boosted trees as a module: (n, F) -> (n,), or (n, K) for K outputs, as the library's Booster
    predicts with all trees. NaN is a missing value.

    `outputs[i]` is the output to which tree i adds; it is 0 for each tree if leaves have a value
    for each output. Sums begin at `base`, (K,), are multiplied by `scale`, and go through the
    function `link`. `features` is F. `names` are the names of the features in the model's order;
    empty if the file has none. `zero` is None for XGBoost; for LightGBM it is the number that
    replaces a zero: 0, or NaN if zeros are missing values. Rows are compared in the dtype of the
    thresholds; float32 rows stay float32, with thresholds that give the same decisions. Raises
    ValueError if the data are no trees.
    """

    missing = True
    columns: torch.Tensor
    replaced: torch.Tensor
    only_missing: torch.Tensor | None
    below: torch.Tensor
    feature: torch.Tensor
    threshold: torch.Tensor
    single: torch.Tensor
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
        joined = _join_trees(trees, features)
        order = np.argsort(outputs, kind="stable")  # put the trees of one output side by side
        groups = len(base) // math.prod(joined.nodes.value.shape[1:])
        output_of_tree = np.repeat(np.arange(groups), len(trees) // groups)
        if not np.array_equal(np.asarray(outputs)[order], output_of_tree):
            raise ValueError("its outputs have different numbers of trees")
        numbered = _number_nodes(joined.nodes, joined.roots[order])
        columns = _choose_columns(numbered, self._equal)
        self.groups, self.depth, self.inner = groups, numbered.depth, numbered.inner
        nodes = numbered.nodes
        leaves = len(nodes.value) - numbered.inner
        real = nodes.threshold.dtype
        only_missing = torch.from_numpy(columns.only_missing)
        self.register_buffer("only_missing", only_missing if only_missing.any() else None)
        for name, array, dtype in (
            ("columns", columns.feature, np.int64),
            ("replaced", columns.replaced, np.float32),
            ("below", nodes.children.reshape(-1), np.int64),
            ("feature", np.append(columns.of_node, np.zeros(leaves)), np.int64),
            ("threshold", columns.threshold, real),
            ("single", _round_to_float32(columns.threshold, self._equal), np.float32),
            ("value", nodes.value[numbered.inner :], real),
            ("roots", numbered.roots, np.int64),
            ("base", base, np.float64),
        ):
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(array, dtype)))

    @property
    def _equal(self) -> bool:
        """Whether a row goes left if its feature is equal to the threshold, as in LightGBM."""
        return self.zero is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Predict the rows `x`. Raises CaptureError if they have not as many features as the
        trees."""
        if x.dim() != 2 or x.shape[1] != self.features:
            shape = ", ".join(map(str, x.shape[1:]))
            raise CaptureError(f"the trees take (n, {self.features}); the block is (n, {shape})")
        single = x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        threshold = self.single if single else self.threshold
        x = x.to(threshold.dtype)
        if self.zero is not None:
            x = torch.where(x.abs() <= _ZERO, self.zero, x)
        x = x[:, self.columns]
        number = x if self.only_missing is None else torch.where(self.only_missing, 0.0, x)
        x = torch.where(x.isnan(), self.replaced.to(x.dtype), number)
        # `lanes` has code for the operator; torch's scripts are written with torch's operators.
        exporting = torch.compiler.is_exporting()
        find_leaves = torch.ops.soa_pipeline.leaves if exporting else descend_trees
        leaf = self.value[
            find_leaves(
                x, self.feature, threshold, self.below, self.roots,
                self.inner, self.depth, self._equal,
            )
        ]  # fmt: skip
        # Sums are in float64, which is closer to the exact sum than xgboost's float32.
        sums = leaf.unflatten(1, (self.groups, -1)).sum(dim=2, dtype=torch.float64).flatten(1)
        scores = _LINKS[self.link](((sums + self.base) * self.scale).to(self.threshold.dtype))
        return scores.squeeze(1) if scores.shape[1] == 1 else scores


class _Joined(NamedTuple):
    """The nodes of all trees, and for each tree the index of its root."""

    nodes: Tree
    roots: Array


def _join_trees(trees: Sequence[Tree], features: int) -> _Joined:
    """Join the nodes of all trees, one tree after the other. Their children, which were indices in
    one tree, become indices of all nodes. Raises ValueError if a child, feature or threshold is not
    valid."""
    nodes = Tree(*map(np.concatenate, zip(*trees, strict=True)))
    counts = np.array([len(tree.value) for tree in trees])
    starts = np.cumsum(counts) - counts
    count_of_tree = np.repeat(counts, counts)[:, None]  # for each node
    inside = ((nodes.children >= 0) & (nodes.children < count_of_tree)).all(axis=1)
    if not (inside & (nodes.feature >= 0) & (nodes.feature < features)).all():
        raise ValueError("a node names a child or a feature that is not there")
    if np.isnan(nodes.threshold).any():
        raise ValueError("a threshold is NaN")
    children = nodes.children + np.repeat(starts, counts)[:, None]
    return _Joined(nodes._replace(children=children), starts)


class _Numbered(NamedTuple):
    """Nodes in the order that the operator `leaves` needs: the `inner` ones, then the leaves from
    left to right. `depth` is the number of levels below the roots."""

    nodes: Tree
    roots: Array
    inner: int
    depth: int


def _number_nodes(nodes: Tree, roots: Array) -> _Numbered:
    """Number the nodes anew, in the order of `_Numbered`. Nodes that no root leads to are left out.
    Raises ValueError if a node is reached twice."""
    children = nodes.children
    is_leaf = (children == np.arange(len(children))[:, None]).all(axis=1)
    levels = _nodes_by_level(children, is_leaf, roots)
    parents = [level[~is_leaf[level]] for level in levels]  # the inner nodes of each level
    leaf_count = is_leaf.astype(np.int64)  # how many leaves are below each node
    for level in reversed(parents):
        leaf_count[level] = leaf_count[children[level]].sum(axis=1)
    # Leaves are numbered from left to right. Each node first gets the number of its first leaf.
    number = np.zeros(len(children), np.int64)
    number[roots] = np.cumsum(leaf_count[roots]) - leaf_count[roots]
    for level in parents:
        left, right = children[level].T
        number[left] = number[level]
        number[right] = number[left] + leaf_count[left]
    # Then inner nodes get the numbers from 0 on in the order that they had, and leaves follow them.
    inner = np.sort(np.concatenate(parents))
    number[is_leaf] += len(inner)
    number[inner] = np.arange(len(inner))
    reached = np.concatenate(levels)
    leaves = reached[is_leaf[reached]]
    order = np.concatenate([inner, leaves[np.argsort(number[leaves])]])
    ordered = Tree(*(values[order] for values in nodes))
    ordered = ordered._replace(children=number[ordered.children])
    return _Numbered(ordered, number[roots], len(inner), depth=len(levels) - 1)


def _nodes_by_level(children: Array, is_leaf: Array, roots: Array) -> list[Array]:
    """The indices of the nodes at each depth, the roots first. Raises ValueError if a node is
    reached twice."""
    levels, count = [roots], len(roots)
    while len(parents := levels[-1][~is_leaf[levels[-1]]]):
        levels.append(children[parents].reshape(-1))
        count += len(levels[-1])
        if count > len(children):
            raise ValueError("the nodes of a tree go in a circle")
    if len(np.unique(np.concatenate(levels))) < count:
        raise ValueError("two nodes of a tree have the same child")
    return levels


class _Columns(NamedTuple):
    """The columns that the nodes compare with their thresholds.

    Column i is the feature `feature[i]`, with the number `replaced[i]` in place of NaN, and with 0
    in place of every other value if `only_missing[i]`. `of_node` is the index of the column of each
    inner node. `threshold` holds the thresholds of all nodes.
    """

    feature: Array
    replaced: Array
    only_missing: Array
    of_node: Array
    threshold: Array


def _choose_columns(numbered: _Numbered, equal: bool) -> _Columns:
    """Choose the numbers that replace NaN, so that a missing value goes to the right side by an
    ordinary comparison.

    A feature has one column if one number (0, -inf or inf) goes to the side of the missing values
    at all of its nodes; else it has two, with -inf and with inf. It has one more for nodes at which
    all numbers go to the other side, even inf and -inf. `equal`: whether a row goes left if its
    feature is equal to the threshold.
    """
    inner = slice(numbered.inner)
    feature = numbered.nodes.feature[inner].astype(np.int64)
    left = numbered.nodes.missing_left[inner].astype(bool)
    limit = numbered.nodes.threshold[inner].astype(np.float64)
    # x <= inf and x < -inf have the same answer for all numbers. LightGBM writes the first for a
    # split of missing values from others.
    only_missing = ~left & (limit == np.inf) if equal else left & (limit == -np.inf)

    def suits(goes_left: Array) -> Array:
        """For each feature: whether a number that goes left at the nodes `goes_left`, and right at
        all others, goes to the side of NaN at each node of the feature that compares numbers."""
        wrong = np.zeros(feature.max(initial=0) + 1, bool)
        wrong[feature[(goes_left != left) & ~only_missing]] = True
        return ~wrong

    zero_goes_left = limit >= 0 if equal else limit > 0
    everywhere, nowhere = np.full_like(left, True), np.full_like(left, False)
    suitable = [suits(zero_goes_left), suits(everywhere), suits(nowhere)]
    number = np.select(suitable, [0.0, -np.inf, np.inf], np.nan)[feature]
    number = np.where(np.isnan(number) | only_missing, np.where(left, -np.inf, np.inf), number)
    rows = np.stack([feature, number, only_missing], axis=1)
    columns, of_node = np.unique(rows, axis=0, return_inverse=True)
    if not len(columns):
        columns = np.zeros((1, 3))  # no tree has a node
    threshold = numbered.nodes.threshold.copy()
    threshold[inner][only_missing] = 0  # `inner` is a slice, so this writes into `threshold`
    return _Columns(
        feature=columns[:, 0],
        replaced=columns[:, 1],
        only_missing=columns[:, 2].astype(bool),
        of_node=of_node.reshape(-1),
        threshold=threshold,
    )


def _round_to_float32(threshold: Array, equal: bool) -> Array:
    """The thresholds as float32 numbers that give each float32 the same decision.

    For x <= threshold (`equal`) they are rounded down, for x < threshold up: then no float32 lies
    between the rounded threshold and the given one.
    """
    with np.errstate(over="ignore"):
        near = threshold.astype(np.float32)
        below, above = (np.nextafter(near, np.float32(side)) for side in (-np.inf, np.inf))
    if equal:
        return np.where(near > threshold, below, near)
    return np.where(near < threshold, above, near)


def load_trees(path: Path) -> Trees:
    """Load the trees in a file of XGBoost (.json, .ubj) or of LightGBM (.txt). Raises SourceError
    if they cannot be read, or have something that is not known here."""
    try:
        content: bytes | bytearray = read_plain(path, links=True, largest=None)
        if path.suffix == ".txt":
            return _read_lightgbm(content.decode())
        if path.suffix == ".ubj":
            import xgboost  # it reads its own binary form

            content = xgboost.Booster(model_file=path).save_raw("json")
        elif path.suffix != ".json":
            raise ValueError("a file of XGBoost ends in .json or .ubj, one of LightGBM in .txt")
        return _read_xgboost(parse_json(bytes(content)))
    except ImportError as error:
        raise SourceError(
            f"{path} is read by xgboost, which cannot be imported ({error}): pip install xgboost, "
            "or save the model as .json"
        ) from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else first_line(error)
        raise SourceError(f"{path} holds no boosted trees that are known here: {why}") from error


def _read_xgboost(document: Any) -> Trees:
    """Make trees of the JSON that XGBoost's `Booster.save_model` writes (xgboost 1.0 to 3.4)."""
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
    weights = booster.get("weight_drop") or model.get("weight_drop") or [1.0] * len(model["trees"])
    pairs = zip(model["trees"], weights, strict=True)
    trees = [_read_xgboost_tree(tree, weight) for tree, weight in pairs]
    link = _link_of(learner["objective"]["name"])
    param = learner["learner_model_param"]
    outputs = max(int(param["num_class"]), int(param.get("num_target", 1)), 1)
    # Before 3.1 there is one value for all outputs. The link function is already applied to it.
    base = np.asarray(param["base_score"].strip("[]").split(","), np.float32)
    if link == "sigmoid":
        base = -np.log(1 / base - 1)
    elif link == "exp":
        base = np.log(base)
    names = tuple(learner.get("feature_names") or ())
    base, features = np.broadcast_to(base, outputs), int(param["num_feature"])
    return Trees(trees, model["tree_info"], base, features, names, link)


def _read_xgboost_tree(tree: Any, weight: float) -> Tree:
    """Make a tree of XGBoost's data. The values of its leaves are multiplied by `weight`."""
    if np.any(tree.get("split_type", 0)):
        raise ValueError(_CATEGORIES)
    if int(tree["tree_param"]["size_leaf_vector"]) > 1:
        raise ValueError("leaves of vectors (multi_output_tree) are not known here")
    children = np.stack([tree["left_children"], tree["right_children"]], axis=1)
    leaf = children < 0
    value = np.asarray(tree["split_conditions"], np.float32)
    return Tree(
        children=np.where(leaf, np.arange(len(leaf))[:, None], children),
        feature=np.where(leaf[:, 0], 0, tree["split_indices"]),
        threshold=value,
        missing_left=np.asarray(tree["default_left"]),
        value=value * np.float32(weight),
    )


def _read_lightgbm(text: str) -> Trees:
    """Make trees of the text that LightGBM's `Booster.save_model` writes (LightGBM 3 and 4)."""
    trees_text = text.partition("\nend of trees")[0]
    header_text, *sections = re.split(r"^Tree=\d+$", trees_text, flags=re.MULTILINE)
    header = _parse_fields(header_text)
    outputs, features = int(header["num_tree_per_iteration"]), int(header["max_feature_idx"]) + 1
    objective, *options = header.get("objective", "custom").split()
    link = _link_of("regression-sqrt" if "sqrt" in options else objective)
    factors = [option.partition(":")[2] for option in options if option.startswith("sigmoid:")]
    scale = float(factors[0]) if factors else 1.0
    parsed = [_read_lightgbm_tree(_parse_fields(section)) for section in sections]
    zero_is_missing = any(entry.zero_is_missing for entry in parsed)
    if zero_is_missing and any(entry.zero_is_a_number for entry in parsed):
        raise ValueError("zero is a missing value (zero_as_missing) in some nodes only")
    if "average_output" in header:
        scale /= len(parsed) // outputs
    return Trees(
        [entry.tree for entry in parsed],
        outputs=[i % outputs for i in range(len(parsed))],
        base=np.zeros(outputs),
        features=features,
        names=tuple(header["feature_names"].split(" ")),
        link=link,
        scale=scale,
        zero=np.nan if zero_is_missing else 0.0,
    )


class _LightgbmTree(NamedTuple):
    """A tree. `zero_is_missing`: some of its nodes take zero for a missing value;
    `zero_is_a_number`: in some nodes zero goes to another side than a missing value."""

    tree: Tree
    zero_is_missing: bool
    zero_is_a_number: bool


def _read_lightgbm_tree(fields: dict[str, str]) -> _LightgbmTree:
    """Make a tree of the fields of its section: the inner nodes in the file's order, then the
    leaves."""
    if int(fields.get("is_linear", 0)):
        raise ValueError("linear trees (linear_tree) are not known here")
    names = ("split_feature", "left_child", "right_child", "decision_type")
    feature, left, right, decision = (_to_array(fields, name, int) for name in names)
    threshold, leaves = (_to_array(fields, name, float) for name in ("threshold", "leaf_value"))
    # The bits of a decision: a categorical split; missing values go left; the missing type, which
    # is none (0: NaN is taken for 0), zero (1) or NaN (2).
    if (decision & 1).any():
        raise ValueError(_CATEGORIES)
    default_left = (decision & 2) > 0
    missing = (decision >> 2) & 3
    zero_left = threshold >= 0
    inner, no_leaf = len(feature), np.zeros_like(leaves)
    leaf_numbers = np.arange(inner, inner + len(leaves))
    children = np.stack([np.append(left, leaf_numbers), np.append(right, leaf_numbers)], axis=1)
    tree = Tree(
        children=np.where(children < 0, inner + ~children, children),  # leaves are ~0, ~1, …
        feature=np.append(feature, no_leaf).astype(int),
        threshold=np.append(threshold, no_leaf),
        missing_left=np.append(np.where(missing == 0, zero_left, default_left), no_leaf),
        value=np.append(0 * left, leaves),
    )
    zero_is_a_number = ((missing == 2) & (default_left != zero_left)).any()
    return _LightgbmTree(tree, 1 in missing, bool(zero_is_a_number))


def _to_array(fields: dict[str, str], name: str, kind: type) -> Array:
    """The numbers in a field of a section, as an array; empty if there is no such field."""
    return np.array(fields.get(name, "").split(), kind)


def _parse_fields(text: str) -> dict[str, str]:
    """The lines `key=value` of a section, as a dict."""
    return {key: value for key, _, value in (line.partition("=") for line in text.splitlines())}


def _link_of(objective: str) -> str:
    """The name in `_LINKS` of the function that an objective applies to the sums of leaves. Raises
    ValueError for an unknown objective."""
    if objective not in _LINK_OF:
        raise ValueError(f"objective {objective!r} is none of {', '.join(_LINK_OF)}")
    return _LINK_OF[objective]
