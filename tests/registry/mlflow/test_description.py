"""What MLflow's own page shows of a version: its table, its curves, and targets built later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient

from registry import Bundle, Manifest, Registry
from registry.mlflow.description import metrics
from soa.records import as_record
from tests.models.bundles import V3, write_annex


def curve(client: MlflowClient, run: str, metric: str) -> list[tuple[int, float]]:
    """Pairs of row count and value of a metric in MLflow's run."""
    return sorted((point.step, point.value) for point in client.get_metric_history(run, metric))


def test_a_version_has_a_curve_of_its_times(registry: Registry, bundle: Bundle) -> None:
    run = str(registry.register(bundle).run_id)
    with registry.client() as client:
        points = curve(client, run, "cpu.x86-64-v3.aoti.median_us")
    assert points == [(10, 11.5), (1000, 210.0)]


def test_a_target_that_was_built_later_is_described(
    registry: Registry, bundle: Bundle, tmp_path: Path
) -> None:
    version = registry.register(bundle)
    aoti = {
        "status": "valid",
        "files": ["annexes/cuda/sm_90/aoti/model.so"],
        "worst": {"probabilities": {"max_abs": 3.5e-7, "max_rel": 1e-5, "outside": 0.0}},
        "benchmark": {"64": {"median_us": 7.5, "p05_us": 7.0, "p95_us": 8.0}},
    }
    record = {"status": "verified", "chosen": "aoti", "candidates": {"aoti": aoti}}
    annex = write_annex(tmp_path / "annex", bundle, "cuda/sm_90", record=record)
    registry.add_target(version, annex)
    row = "| cuda/sm_90 | verified | aoti (chosen) | valid | probabilities 3.5e-7 | 7.5 µs at"
    with registry.client() as client:
        run = client.get_run(str(version.run_id))
        described = str(client.get_model_version("jets", "1").description)
        points = curve(client, run.info.run_id, "cuda.sm_90.aoti.median_us")
    assert f"| {V3} | verified |" in described
    assert row in described
    assert run.data.tags["mlflow.note.content"] == described
    assert run.data.metrics["cuda.sm_90.aoti.n64.median_us"] == 7.5
    assert points == [(64, 7.5)]


def test_of_several_row_dimensions_the_largest_is_the_step(manifest_data: dict[str, Any]) -> None:
    times = {"median_us": 7.5, "p05_us": 7.0, "p95_us": 8.0}
    candidate = manifest_data["targets"][V3]["candidates"]["aoti"]
    candidate["benchmark"] = {"nodes=5,edges=20": times}
    points = set(metrics(as_record(Manifest, manifest_data).targets))
    assert ("cpu.x86-64-v3.aoti.median_us", 7.5, 20) in points
