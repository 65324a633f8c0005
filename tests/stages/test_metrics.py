"""Metrics of labels and outputs, and refusals of results that are not numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import MetricError
from stages.metrics import Metric, Values, efficiency, resolution
from stages.reports import NotDrawn

metrics = pytest.importorskip("sklearn.metrics", reason="the extra `metrics` has it")

SCORES = np.array([0.1, 0.4, 0.35, 0.8])
LABELS = np.array([0, 0, 1, 1])
TWO = np.stack([1 - SCORES, SCORES], axis=1)


def no_column(name: str) -> Values:
    """A metric that reads no other column does not call this."""
    raise AssertionError(name)


def value(function: str, labels: Values, output: Values, **settings: Any) -> float:
    """A metric of an output that reads no other column."""
    return Metric("m", function, "y", "truth", **settings).value(labels, output, no_column)


@pytest.mark.parametrize(
    ("function", "output", "settings", "expected"),
    [
        ("roc_auc", SCORES, {}, 0.75),
        ("roc_auc_score", SCORES, {}, 0.75),
        ("average_precision", SCORES, {}, metrics.average_precision_score(LABELS, SCORES)),
        ("log_loss", SCORES, {}, metrics.log_loss(LABELS, SCORES)),
        ("log_loss", TWO, {}, metrics.log_loss(LABELS, TWO)),
        ("accuracy", TWO, {}, 0.75),  # the larger column wins
        ("accuracy", SCORES, {"threshold": 0.3}, 0.75),
        ("f1", SCORES, {"threshold": 0.3}, 0.8),
        ("mean_squared_error", SCORES, {}, metrics.mean_squared_error(LABELS, SCORES)),
        (
            "roc_auc",
            SCORES,
            {"kwargs": {"max_fpr": 0.5}},
            metrics.roc_auc_score(LABELS, SCORES, max_fpr=0.5),
        ),
    ],
)
def test_a_metric_by_its_name_in_scikit_learn(
    function: str, output: Values, settings: dict[str, Any], expected: float
) -> None:
    assert value(function, LABELS, output, **settings) == pytest.approx(expected)


WRITERS = """
import torch

def sorts(labels, outputs, column):
    outputs.sort()
    return outputs[0]

def sorts_labels(labels, outputs, column):
    labels[:] = 0
    return 1

def sorts_a_column(labels, outputs, column):
    column("mass").sort()
    return 1

def through_torch(labels, outputs, column):
    for each in (labels, outputs, column("mass")):
        torch.from_numpy(each).zero_()
    return 1

def keeps(labels, outputs, column, edges):
    edges.append(1)
    return len(edges)
"""


@pytest.fixture
def written_by(tmp_path: Path) -> Callable[[str], list[Values]]:
    """Labels, scores and a column after a function of `WRITERS` got them, by its name; the arrays
    are those of its last call, also if it raised."""
    (tmp_path / "own.py").write_text(WRITERS)
    labels, scores, mass = LABELS.copy(), SCORES.copy(), SCORES.copy()

    def call(name: str) -> list[Values]:
        if name:
            metric = Metric("m", f"{tmp_path}/own.py:{name}", "y", "truth")
            metric.value(labels, scores, lambda _: mass)
        return [labels, scores, mass]

    return call


@pytest.mark.parametrize("name", ["sorts", "sorts_labels", "sorts_a_column"])
def test_a_function_cannot_write_into_its_arrays(
    written_by: Callable[[str], list[Values]], name: str
) -> None:
    with pytest.raises(MetricError, match="read-only"):
        written_by(name)
    for array, original in zip(written_by(""), (LABELS, SCORES, SCORES), strict=True):
        assert np.array_equal(array, original)


def test_a_function_that_writes_through_torch_writes_into_copies(
    written_by: Callable[[str], list[Values]],
) -> None:
    """torch does not know that an array is read-only."""
    for array, original in zip(written_by("through_torch"), (LABELS, SCORES, SCORES), strict=True):
        assert np.array_equal(array, original)


def test_a_function_gets_the_same_arguments_each_time(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(WRITERS)
    metric = Metric("m", f"{tmp_path}/own.py:keeps", "y", "truth", kwargs={"edges": [0]})
    assert [metric.value(LABELS, SCORES, no_column) for _ in range(2)] == [2, 2]


def test_one_class_of_several_may_be_the_signal() -> None:
    flavours = np.array([4, 0, 5, 5])
    assert value("roc_auc", flavours, SCORES, signal=5) == 0.75


def random_scores(seed: int) -> tuple[Values, Values]:
    """Two hundred scores with ties, which are larger for the signal, and their labels."""
    draw = np.random.default_rng(seed)
    labels = np.append([0, 1], draw.integers(0, 2, 200))  # both classes are there
    return labels, draw.normal(labels, 1).round(1)


@given(st.integers(0, 1000), st.floats(0.001, 0.999))
def test_the_working_point_lets_at_most_that_background_pass(seed: int, background: float) -> None:
    labels, scores = random_scores(seed)
    others, signal = scores[labels == 0], scores[labels == 1]
    allowed = background * len(others) + 1e-9
    thresholds = [t for t in np.unique(others) if np.sum(others > t) <= allowed]
    best = max(np.mean(signal > threshold) for threshold in thresholds)
    assert efficiency(labels, scores, background=background) == best


@given(st.integers(0, 1000), st.sampled_from([-0.3, 0.5]))
def test_an_efficiency_at_a_threshold_is_the_signal_above_it(seed: int, threshold: float) -> None:
    labels, scores = random_scores(seed)
    above = np.mean(scores[labels == 1] > threshold)
    assert efficiency(labels, scores, threshold=threshold) == above


def test_a_resolution_is_the_width_of_the_residuals() -> None:
    """A bias does not count."""
    draw = np.random.default_rng(1)
    truth = draw.uniform(10, 20, 100_000)
    shifted = truth + draw.normal(3, 2, 100_000)
    assert resolution(truth, shifted) == pytest.approx(2, rel=0.02)


def test_a_relative_resolution_is_that_of_the_ratio() -> None:
    draw = np.random.default_rng(1)
    truth = draw.uniform(10, 20, 100_000)
    scaled = truth * draw.normal(1, 0.1, 100_000)
    assert resolution(truth, scaled, relative=True) == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize(
    ("function", "labels", "says"),
    [
        ("roc_auc", np.ones(4), "needs two classes, and every label 'truth' is 1.0"),
        ("efficiency", np.zeros(4), "needs two classes"),
        ("efficiency", np.array([0, 1, np.nan, np.nan]), "'truth' is NaN in 2 of 4 rows"),
        ("accuracy", np.array([0, 1, np.nan, 1]), "'truth' is NaN in 1 of 4 rows"),
        ("rock_auc", LABELS, "'rock_auc' is neither efficiency, resolution nor a function"),
        ("silhouette", LABELS, "neither efficiency"),
    ],
)
def test_a_metric_that_cannot_be_computed_is_refused_before_anything_is_built(
    function: str, labels: Values, says: str
) -> None:
    with pytest.raises(MetricError, match=says):
        Metric("m", function, "y", "truth").check(labels)


def test_equal_labels_are_enough_for_a_resolution() -> None:
    Metric("m", "resolution", "y", "truth").check(np.ones(4))  # not refused


OWN = """
def mean(labels, outputs, column):
    return (outputs * column("weight")).mean()
def nan(labels, outputs, column):
    return float("nan")
def text(labels, outputs, column):
    return "good"
def fails(labels, outputs, column):
    raise KeyError("mass")
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], float]:
    """The value of a function of `OWN`, by its name."""
    (tmp_path / "own.py").write_text(OWN)

    def column(name: str) -> Values:
        return np.full(4, 2.0 if name == "weight" else 0.0)

    def call(name: str) -> float:
        metric = Metric("m", f"{tmp_path / 'own.py'}:{name}", "y", "truth")
        metric.check(LABELS)
        return metric.value(LABELS, SCORES, column)

    return call


def test_a_function_of_ones_own_reads_columns(own: Callable[[str], float]) -> None:
    assert own("mean") == pytest.approx(2 * SCORES.mean())


@pytest.mark.parametrize(
    ("name", "says"),
    [("nan", "gave nan on 4 rows"), ("text", "gave a str, not a"), ("fails", "KeyError: 'mass'")],
)
def test_a_function_of_ones_own_that_gives_no_number_is_refused(
    own: Callable[[str], float], name: str, says: str
) -> None:
    with pytest.raises(MetricError, match=says):
        own(name)


@pytest.mark.parametrize(
    ("function", "labels", "scores", "says"),
    [
        ("accuracy", LABELS, SCORES, "failed: ValueError"),  # no threshold
        ("roc_auc", LABELS, SCORES[:3], "4 labels, 3 rows"),
        ("roc_auc", np.ones(4), SCORES, "gave nan on 4 rows"),
    ],
)
def test_rows_of_which_a_metric_has_no_number_are_refused(
    function: str, labels: Values, scores: Values, says: str
) -> None:
    with pytest.raises(MetricError, match=says):
        value(function, labels, scores)


def curve(function: str, labels: Values, output: Values, **settings: Any) -> Any:
    """The curve of a metric: Roc, Residual or NotDrawn."""
    return Metric("m", function, "y", "truth", **settings).curve(labels, output)


@pytest.fixture(scope="module")
def labels_and_scores() -> tuple[Values, Values]:
    """Twenty thousand scores with ties, and their labels."""
    draw = np.random.default_rng(1)
    labels = draw.integers(0, 2, 20_000)
    return labels, draw.normal(labels, 1.0).round(2).astype(np.float32)


of_a_score = pytest.mark.parametrize(
    ("function", "settings"), [("roc_auc", {}), ("efficiency", {}), ("f1", {"threshold": 0.5})]
)


@of_a_score
def test_the_curve_of_a_score_has_few_points_each_at_a_threshold(
    labels_and_scores: tuple[Values, Values], function: str, settings: dict[str, Any]
) -> None:
    roc = curve(function, *labels_and_scores, **settings)
    assert 50 < len(roc.signal) == len(roc.background) <= 100
    background, signal, _ = metrics.roc_curve(*labels_and_scores, drop_intermediate=False)
    points = {*zip(signal, background, strict=True)}
    assert {*zip(roc.signal, roc.background, strict=True)} <= points
    assert min(roc.background) < 1e-3


@of_a_score
def test_the_area_below_the_curve_of_a_score_is_scikit_learns(
    labels_and_scores: tuple[Values, Values], function: str, settings: dict[str, Any]
) -> None:
    roc = curve(function, *labels_and_scores, **settings)
    area = metrics.auc([0, *roc.background, 1], [0, *roc.signal, 1])
    assert area == pytest.approx(metrics.roc_auc_score(*labels_and_scores), abs=2e-3)


def test_the_curve_of_the_signal_that_is_named() -> None:
    labels = np.array([5, 5, 7, 9])
    roc = curve("roc_auc", labels, np.array([0.1, 0.2, 0.9, 0.3]), signal=7)
    assert (roc.signal[0], roc.background[0]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("function", "output", "settings"),
    [
        ("accuracy", TWO, {}),
        ("accuracy", LABELS, {}),
        (f"{__file__}:no_column", SCORES, {}),
        ("roc_auc", TWO, {}),
    ],
)
def test_a_metric_that_is_no_function_of_one_score_has_no_curve(
    function: str, output: Values, settings: dict[str, Any]
) -> None:
    assert isinstance(curve(function, LABELS, output, **settings), NotDrawn)


@pytest.mark.parametrize("label", [0, 1])
def test_rows_of_one_class_have_no_curve(label: int) -> None:
    drawn = curve("efficiency", np.full(4, label), np.linspace(0, 1, 4))
    assert isinstance(drawn, NotDrawn)


TRUTH = np.linspace(1, 100, 10_000)
RELATIVE = {"kwargs": {"relative": True}}


def test_relative_residuals_are_divided_by_the_truth() -> None:
    residual = curve("resolution", TRUTH, (TRUTH * 1.5).astype(np.float32), **RELATIVE)
    assert residual.relative and residual.found.mean == pytest.approx(0.5)


def test_absolute_residuals_are_all_counted() -> None:
    """All are counted, of which few are beyond the edges."""
    residual = curve("mean_squared_error", TRUTH, (TRUTH * 1.5).astype(np.float32))
    assert not residual.relative and residual.found.finite == 10_000
    assert residual.found.largest == pytest.approx(50)
    assert 0 < residual.found.below + residual.found.above <= 200


def test_relative_residuals_of_zero_are_not_finite() -> None:
    zeros = np.zeros(10_000)
    residual = curve("resolution", zeros, zeros.astype(np.float32), **RELATIVE)
    assert residual.found.nonfinite == 10_000
