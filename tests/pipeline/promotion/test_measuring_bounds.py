"""Gates with bounds that users set: metrics of the outputs, latency, memory, size."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.promotion.promoting import Assessment, promote
from registry.bundle import CURVES
from registry.bundle.bundle import Bundle
from registry.promotion import Decision, PromotionRefused
from registry.store.registry import Registry
from soa.files import digest_of
from tests.models import mlps
from tests.models.project import PASSED, TARGET, cli, described, refusal, resealed
from tests.pipeline.promotion.conftest import GATES, ROWS, Gated, regated, write_gated

pytestmark = pytest.mark.usefixtures("measured_once")


def metrics(judged: Assessment | PromotionRefused) -> dict[str, Decision]:
    """The decisions on metrics, by the name of the metric, with which each detail begins."""
    decisions = [decision for decision in judged.decisions if decision.gate == "metrics"]
    return {decision.detail.split()[0]: decision for decision in decisions}


def test_a_first_version_is_compared_with_none(empty: Registry, gated: Gated) -> None:
    empty.register(gated.bad)
    first = promote(empty, "jets/1", "production")
    assert "jets/" not in metrics(first)["accuracy"].detail


def test_a_better_model_passes(empty: Registry, gated: Gated) -> None:
    empty.promote(empty.register(gated.bad), "production", PASSED)
    better = promote(empty, empty.register(gated.good).ref, "production")
    assert metrics(better)["accuracy"].found.startswith("1; jets/1 has 0.")


def test_a_worse_model_is_refused_and_changes_nothing(
    empty: Registry, gated: Gated, tmp_path: Path
) -> None:
    """It is compared with production, not with another version that is as bad."""
    empty.register(gated.bad)
    empty.promote(empty.register(gated.good), "production", PASSED)
    worse = empty.register(described(gated.bad, tmp_path / "worse", "worse again"))
    with pytest.raises(PromotionRefused) as caught:
        promote(empty, worse.ref, "production")
    refused = [decision.gate for decision in caught.value.decisions if not decision.passed]
    assert refused == ["metrics"]
    detail = metrics(caught.value)["accuracy"].detail
    assert detail.startswith(f"accuracy on {TARGET} is 0.")
    assert detail.endswith("; jets/2 has 1, limit >= 0.001, drop <= 0.01")
    assert empty.find("jets@production").ref == "jets/2"
    assert empty.find(worse.ref).aliases == ()


def test_the_version_has_the_labelled_rows(gated: Gated) -> None:
    stored = gated.bad.manifest.labelled
    assert stored is not None
    assert (stored.source, stored.rows) == ("test.parquet", ROWS)
    assert stored.sha256 == digest_of(gated.data) == digest_of(gated.bad.file(stored.file))
    assert stored.code == {"weighted": "metrics/weighted.py"}


def test_the_version_has_the_metrics_of_the_model(gated: Gated) -> None:
    with torch.no_grad():
        eager = mlps.PointwiseFirst(2)(gated.features)
    metrics = gated.bad.manifest.targets[TARGET].metrics
    right = (eager.argmax(1) == gated.truth).double().mean()
    assert metrics["accuracy"] == pytest.approx(float(right))
    assert metrics["weighted"] == pytest.approx(float(eager[:, 1].mean()) / 2, rel=1e-4)
    # The area under the curve is the share of pairs in which the signal has the larger score.
    signal = gated.truth == 0
    above = eager[signal, 0][:, None] > eager[~signal, 0]
    assert metrics["auc"] == pytest.approx(float(above.double().mean()), abs=1e-3)
    assert 0 <= metrics["eff"] < 1


def test_the_version_has_curves_of_scores(gated: Gated) -> None:
    curves = gated.bad.report(CURVES)
    assert {*curves[TARGET]} == {"auc", "eff", "accuracy", "weighted"}
    not_drawn = {name for name, curve in curves[TARGET].items() if "why" in curve}
    assert not_drawn == {"accuracy", "weighted"}  # they are no curves


def test_the_page_of_the_version_has_its_metrics(
    empty: Registry, gated: Gated, tmp_path: Path
) -> None:
    stored = gated.bad.manifest.labelled
    assert stored is not None
    empty.register(gated.bad)
    page = tmp_path / "page.html"
    cli("show", "jets/1", "--html", page, "--registry", empty.uri)
    shown = cli("show", "jets/1", "--registry", empty.uri).stdout
    assert "background that passes with the signal; auc, eff: " in page.read_text()
    assert "weighted is not drawn: " in page.read_text()
    assert f"on 3,000 rows of test.parquet, sha256 {stored.sha256[:12]}" in shown
    assert "accuracy" in shown


def bounded(
    registry: Registry, bundle: Bundle, folder: Path, *, us: float, mb: float, share: float
) -> dict[str, Decision]:
    """The decisions on a version with limits of latency, of memory and artifacts, and of a share.

    Of the many rows that the run tried, `share` may lie outside the tolerance. The limit of
    artifacts is a twentieth of that of memory.
    """
    bounds = {
        "metrics": None,
        "latency_p99_us": [{"rows": {"n": 100}, "max": us}],
        "memory_mb": [{"rows": {"n": 1000}, "max": mb}],
        "max_artifact_mb": mb / 20,
        "outside_share": share,
    }
    ref = registry.register(regated(bundle, folder, bounds)).ref
    assessment = promote(registry, ref, "staging", dry_run=True)
    gates = ("latency", "memory", "size", "outside share")
    return {d.gate: d for d in assessment.decisions if d.gate in gates}


def test_a_version_within_its_bounds_passes(empty: Registry, gated: Gated, tmp_path: Path) -> None:
    decisions = bounded(empty, gated.good, tmp_path / "loose", us=1e6, mb=2000, share=1e-2)
    assert [decision.passed for decision in decisions.values()] == [True] * 4, decisions
    assert 0 < float(decisions["memory"].found.replace(",", "")) < 2000
    assert 1 < float(decisions["latency"].found.replace(",", "")) < 1e6


def test_a_version_beyond_its_bounds_is_refused(
    empty: Registry, gated: Gated, tmp_path: Path
) -> None:
    decisions = bounded(empty, gated.good, tmp_path / "tight", us=0.1, mb=0.001, share=1e-6)
    assert [decision.passed for decision in decisions.values()] == [False] * 4, decisions
    latency = decisions["latency"]
    assert latency.detail.startswith(f"p99 of a call on {TARGET} at n=100 in us is ")
    assert latency.limit == "<= 0.1"


def test_a_damaged_version_in_place_fails_only_bounds_on_a_change(
    empty: Registry, gated: Gated, tmp_path: Path
) -> None:
    """It cannot be measured. Bounds on the number itself decide as usual."""
    empty.register(gated.good)
    promote(empty, "jets/1", "production")
    folder = empty.local_path(empty.find("jets/1"))
    assert folder is not None
    (folder / "program.pt2").unlink()
    other = empty.register(described(gated.good, tmp_path / "other", "other"))
    with pytest.raises(PromotionRefused) as caught:
        promote(empty, other.ref, "production")
    decisions = metrics(caught.value)
    assert {name: decision.passed for name, decision in decisions.items()} == {
        "accuracy": False,
        "auc": True,
        "eff": True,
        "weighted": True,
    }
    assert "jets/1: it cannot be run here" in decisions["accuracy"].detail


def test_a_version_without_the_rows_is_refused(
    empty: Registry, gated: Gated, tmp_path: Path
) -> None:
    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        manifest["labelled"] = None
        shutil.rmtree(folder / "metrics")

    ref = empty.register(resealed(gated.good, tmp_path / "edited", edit)).ref
    with pytest.raises(PromotionRefused, match="the version has no labelled rows"):
        promote(empty, ref, "staging")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("label: truth", "label: trutz", "test.parquet has no 'trutz'; it has a, b"),
        ("roc_auc", "rock_auc", "'rock_auc' is neither efficiency, resolution nor a function"),
        (
            "signal: 0}",
            "signal: 9}",
            "'auc': roc_auc needs two classes, and of the labels 'truth' all or none are 9",
        ),
        ("own.py:weighted", "own.py:waited", "own.py has no callable 'waited'"),
    ],
)
def test_refused_before_anything_is_built(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GATES
    written = write_gated(tmp_path / "made", 1, GATES.replace(old, new, 1))
    line = refusal("run", written.config, "--work", written.work, "--registry", written.registry)
    assert says in line
    assert not (written.work / "compile").exists()


def test_a_metric_that_is_no_number_ends_the_run(gated: Gated, tmp_path: Path) -> None:
    written, registry = gated.project, f"sqlite:///{tmp_path}/registry.db"
    (written.folder / "own.py").write_text("def weighted(labels, outputs, column): return None")
    line = refusal("run", written.config, "--work", written.work, "--registry", registry)
    assert line.endswith("own.py:weighted gave a NoneType, not a number")
    assert not Registry(registry).exists
