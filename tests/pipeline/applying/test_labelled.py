"""Labelled rows give the same metrics from every format, flat or jagged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.applying.labelled import Labelled
from pipeline.config import MetricsConfig
from pipeline.errors import DataError
from runtime.session.session import Session
from soa.memory.span import Array
from stages.errors import MetricError
from tests.models import building, mlps, scored
from tests.models.scored import write_rows

ROWS = 250  # the version takes at most 100 rows at a time
every_format = pytest.mark.parametrize("suffix", [".npz", ".parquet", ".feather", ".h5", ".root"])
METRICS = {
    "data": "",
    "label": "truth",
    "functions": {
        "accuracy": {"function": "accuracy", "output": "probabilities"},
        "auc": {"function": "roc_auc", "output": "x", "signal": 0},
    },
}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A model of jets that takes at most 100 rows at a time."""
    folder = tmp_path_factory.mktemp("labelled")
    built = building.build(
        mlps.PointwiseFirst(1), building.mlp_signature(100), folder, ("exported",)
    )
    return built.session("exported")


@pytest.fixture(scope="module")
def columns() -> dict[str, Array]:
    """Rows with their labels: the model's own classes, but for fifty random ones."""
    rows = scored.columns(ROWS)
    truth = scored.eager(rows).argmax(1)
    truth[:50] = np.random.default_rng(3).integers(0, 3, 50)
    return {**{name: rows[name] for name in mlps.FEATURES}, "truth": truth}


@every_format
def test_metrics_of_rows_in_every_format(
    session: Session, columns: dict[str, Array], tmp_path: Path, suffix: str
) -> None:
    path = write_rows(tmp_path / f"test{suffix}", columns, 70)
    labelled = Labelled(path, MetricsConfig.model_validate(METRICS), {})
    labelled.check(session.signature, {})
    metrics = labelled.measure(session, {})
    eager = scored.eager(columns)
    right = float(np.mean(eager.argmax(1) == columns["truth"]))
    assert [metric.why for metric in metrics.values()] == ["", ""]
    assert metrics["accuracy"].value == pytest.approx(right)
    # The share of pairs in which the signal has the larger score; equal scores count half.
    signal, rest = eager[columns["truth"] == 0, 0], eager[columns["truth"] != 0, 0]
    pairs = (signal[:, None] > rest).mean() + (signal[:, None] == rest).mean() / 2
    assert metrics["auc"].value == pytest.approx(pairs, abs=1e-3)


def labelled_rows(path: Path, columns: dict[str, Array]) -> Labelled:
    """Labelled rows in a new file of this name, with METRICS."""
    return Labelled(write_rows(path, columns), MetricsConfig.model_validate(METRICS), {})


@every_format
def test_columns_of_other_names_give_the_same_metrics(
    session: Session, columns: dict[str, Array], tmp_path: Path, suffix: str
) -> None:
    renamed = {f"in_{name}" if name in mlps.FEATURES else name: v for name, v in columns.items()}
    plain = labelled_rows(tmp_path / f"plain{suffix}", columns)
    other = labelled_rows(tmp_path / f"renamed{suffix}", renamed)
    assert other.measure(session, {"jets/*": "in_*"}) == plain.measure(session, {})


def test_a_file_without_a_models_column_is_refused(
    session: Session, columns: dict[str, Array], tmp_path: Path
) -> None:
    renamed = {f"in_{name}" if name in mlps.FEATURES else name: v for name, v in columns.items()}
    with pytest.raises(DataError, match="has no 'a'; it has in_a, in_b"):
        labelled_rows(tmp_path / "renamed.npz", renamed).check(session.signature, {})


@every_format
def test_a_file_without_rows_is_refused(
    session: Session, columns: dict[str, Array], tmp_path: Path, suffix: str
) -> None:
    none = {name: values[:0] for name, values in columns.items()}
    with pytest.raises(MetricError, match="has no rows: metrics need some"):
        labelled_rows(tmp_path / f"none{suffix}", none).check(session.signature, {})


def test_each_metric_may_have_a_label_of_its_own(
    session: Session, columns: dict[str, Array], tmp_path: Path
) -> None:
    """Then no common label is needed."""
    own = {"accuracy": {"function": "accuracy", "output": "probabilities", "label": "other"}}
    config = MetricsConfig.model_validate({"data": "", "functions": own})
    write_rows(tmp_path / "test.npz", {**columns, "other": columns["truth"] * 0})
    labelled = Labelled(tmp_path / "test.npz", config, {})
    labelled.check(session.signature, {})
    (tmp_path / "bundle").mkdir()
    record = labelled.copy_files(tmp_path / "bundle" / "metrics")
    again = Labelled.from_bundle(record, config, tmp_path / "bundle")
    assert record.rows == ROWS
    assert 0 < again.measure(session, {})["accuracy"].value < 1


def test_rows_and_functions_kept_in_a_bundle_need_no_other_file(
    session: Session, columns: dict[str, Array], tmp_path: Path
) -> None:
    write_rows(tmp_path / "test.npz", columns)
    (tmp_path / "own.py").write_text("def mine(labels, outputs, column): return len(column('a'))")
    own = {"own": {"function": "own.py:mine", "output": "y"}}
    config = MetricsConfig.model_validate({**METRICS, "functions": own})
    first = Labelled(tmp_path / "test.npz", config, {"own": f"{tmp_path / 'own.py'}:mine"})
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    record = first.copy_files(bundle / "metrics")
    for name in ("test.npz", "own.py"):
        (tmp_path / name).unlink()
    assert (record.file, record.code) == ("metrics/data.npz", {"own": "metrics/own.py"})
    again = Labelled.from_bundle(record, config, bundle)
    assert again.measure(session, {})["own"].value == ROWS


def test_a_metric_without_a_value_says_why(
    session: Session, columns: dict[str, Array], tmp_path: Path
) -> None:
    """The other metrics have their values."""
    write_rows(tmp_path / "test.npz", columns)
    functions = {**METRICS["functions"], "f1": {"function": "f1", "output": "x"}}  # type: ignore[dict-item]
    config = MetricsConfig.model_validate({**METRICS, "functions": functions})
    metrics = Labelled(tmp_path / "test.npz", config, {}).measure(session, {})
    assert np.isnan(metrics["f1"].value) and "f1 failed: ValueError" in metrics["f1"].why
    assert metrics["accuracy"].value > 0.5
