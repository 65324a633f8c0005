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
    raise AssertionError(name)


def value(function: str, labels: Values, output: Values, **more: Any) -> float:
    return Metric("m", function, "y", "truth", **more).value(labels, output, no_column)


@pytest.mark.parametrize(
    ("function", "output", "more", "expected"),
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
        ("roc_auc", SCORES, {"kwargs": {"max_fpr": 0.5}}, None),
    ],
)
def test_names_of_scikit_learn(
    function: str, output: Values, more: dict[str, Any], expected: float | None
) -> None:
    if expected is None:
        expected = metrics.roc_auc_score(LABELS, SCORES, max_fpr=0.5)
    assert value(function, LABELS, output, **more) == pytest.approx(expected)


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


@pytest.mark.parametrize("name", ["sorts", "sorts_labels", "sorts_a_column"])
def test_a_function_cannot_change_what_others_see(name: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(WRITERS)
    labels, scores, mass = LABELS.copy(), SCORES.copy(), SCORES.copy()
    metric = Metric("m", f"{tmp_path}/own.py:{name}", "y", "truth")
    with pytest.raises(MetricError, match="read-only"):
        metric.value(labels, scores, lambda _: mass)
    Metric("m", f"{tmp_path}/own.py:through_torch", "y", "truth").value(
        labels, scores, lambda _: mass
    )
    assert np.array_equal(labels, LABELS)
    assert np.array_equal(scores, SCORES) and np.array_equal(mass, SCORES)


def test_a_function_gets_the_same_arguments_each_time(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(WRITERS)
    metric = Metric("m", f"{tmp_path}/own.py:keeps", "y", "truth", kwargs={"edges": [0]})
    assert [metric.value(LABELS, SCORES, no_column) for _ in range(2)] == [2, 2]


def test_a_class_of_several() -> None:
    flavours = np.array([4, 0, 5, 5])
    assert value("roc_auc", flavours, SCORES, signal=5) == 0.75


@given(st.integers(0, 1000), st.floats(0.001, 0.999))
def test_the_working_point_lets_at_most_that_background_pass(seed: int, background: float) -> None:
    draw = np.random.default_rng(seed)
    labels = np.append([0, 1], draw.integers(0, 2, 200))
    scores = draw.normal(labels, 1).round(1)  # with ties
    found = efficiency(labels, scores, background=background)
    other, signal = scores[labels == 0], scores[labels == 1]
    allowed = background * len(other) + 1e-9
    points = [t for t in np.unique(other) if np.sum(other > t) <= allowed]
    assert found == max(np.mean(signal > t) for t in points)
    for threshold in (-0.3, 0.5):
        assert efficiency(labels, scores, threshold=threshold) == np.mean(signal > threshold)


def test_resolution() -> None:
    draw = np.random.default_rng(1)
    truth = draw.uniform(10, 20, 100_000)
    assert resolution(truth, truth + draw.normal(3, 2, 100_000)) == pytest.approx(2, rel=0.02)
    assert resolution(truth, truth * draw.normal(1, 0.1, 100_000), relative=True) == pytest.approx(
        0.1, rel=0.02
    )


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
def test_refused_before_anything_is_built(function: str, labels: Values, says: str) -> None:
    with pytest.raises(MetricError, match=says):
        Metric("m", function, "y", "truth").check(labels)


def test_equal_labels_are_enough_for_a_resolution() -> None:
    Metric("m", "resolution", "y", "truth").check(np.ones(4))


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

    def call(name: str) -> float:
        metric = Metric("m", f"{tmp_path / 'own.py'}:{name}", "y", "truth")
        metric.check(LABELS)
        return metric.value(LABELS, SCORES, lambda name: np.full(4, 2.0 if name == "weight" else 0))

    return call


def test_a_function_of_ones_own_reads_columns(own: Callable[[str], float]) -> None:
    assert own("mean") == pytest.approx(2 * SCORES.mean())


@pytest.mark.parametrize(
    ("name", "says"),
    [("nan", "gave nan on 4 rows"), ("text", "gave a str, not a"), ("fails", "KeyError: 'mass'")],
)
def test_a_function_of_ones_own_that_gives_no_number(
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
def test_rows_of_which_a_metric_has_no_number(
    function: str, labels: Values, scores: Values, says: str
) -> None:
    with pytest.raises(MetricError, match=says):
        value(function, labels, scores)


def curve(function: str, labels: Values, output: Values, **more: Any) -> Any:
    return Metric("m", function, "y", "truth", **more).curve(labels, output)


@pytest.mark.parametrize("function", ["roc_auc", "efficiency", "f1"])
def test_the_curve_of_a_score(function: str) -> None:
    """Each point belongs to a threshold; there are few points; the area is scikit-learn's."""
    draw = np.random.default_rng(1)
    labels = draw.integers(0, 2, 20_000)
    scores = (draw.normal(labels, 1.0)).round(2).astype(np.float32)
    more = {"threshold": 0.5} if function == "f1" else {}
    found = curve(function, labels, scores, **more)
    assert 50 < len(found.signal) == len(found.background) <= 100
    fake, kept, _ = metrics.roc_curve(labels, scores, drop_intermediate=False)
    assert {*zip(found.signal, found.background, strict=True)} <= {*zip(kept, fake, strict=True)}
    area = metrics.auc([0, *found.background, 1], [0, *found.signal, 1])
    assert area == pytest.approx(metrics.roc_auc_score(labels, scores), abs=2e-3)
    assert min(found.background) < 1e-3


def test_the_curve_of_the_signal_that_is_named() -> None:
    labels = np.array([5, 5, 7, 9])
    found = curve("roc_auc", labels, np.array([0.1, 0.2, 0.9, 0.3]), signal=7)
    assert (found.signal[0], found.background[0]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("function", "output", "more"),
    [
        ("accuracy", TWO, {}),
        ("accuracy", LABELS, {}),
        (f"{__file__}:no_column", SCORES, {}),
        ("roc_auc", TWO, {}),
    ],
)
def test_no_curve(function: str, output: Values, more: dict[str, Any]) -> None:
    assert isinstance(curve(function, LABELS, output, **more), NotDrawn)


@pytest.mark.parametrize("label", [0, 1])
def test_no_curve_of_one_class(label: int) -> None:
    found = curve("efficiency", np.full(4, label), np.linspace(0, 1, 4))
    assert isinstance(found, NotDrawn)


def test_residuals() -> None:
    labels = np.linspace(1, 100, 10_000)
    output = (labels * 1.5).astype(np.float32)
    found = curve("resolution", labels, output, kwargs={"relative": True})
    assert found.relative and found.found.mean == pytest.approx(0.5)
    absolute = curve("mean_squared_error", labels, output)
    assert not absolute.relative and absolute.found.finite == 10_000
    assert absolute.found.largest == pytest.approx(50)
    assert 0 < absolute.found.below + absolute.found.above <= 200
    zero = curve("resolution", labels * 0, output * 0, kwargs={"relative": True})
    assert zero.found.nonfinite == 10_000
