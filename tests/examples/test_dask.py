"""Jets of the real NanoAOD file in coffea; workers that run as jobs of a batch system."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.nanoaod import data, train
from examples.nanoaod.model import INPUTS, build
from pipeline.config import load_config
from pipeline.loading import load
from tests.models import served

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_coffea_processor_scores_jets(
    nanoaod_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Here, and on a worker, which opens the same version as the session."""
    pytest.importorskip("coffea", reason="coffea is not installed: docs/howto/dask.md")
    from distributed import Client, LocalCluster

    from examples.dask.processor import run

    model = build().eval()
    model.load_state_dict(load_file(train.WEIGHTS))
    signature = load_config(ROOT / "configs" / "nanoaod.yaml").signature()
    bundle = served.shared(tmp_path_factory, "flavours", model, signature)
    columns, _ = data.jets(nanoaod_file)
    features = np.stack([columns[name].astype(np.float32) for name in INPUTS], axis=1)
    with torch.no_grad():
        answers = model(torch.from_numpy(features)).numpy()
    histogram, _ = np.histogram(answers[:, 2], bins=20, range=(0, 1))
    with (
        closing(load(bundle.path, mode="test")) as session,
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        for where in (None, client):
            counts = run([str(nanoaod_file)], session, where, chunk=60)["jets"]
            assert (counts["events"], counts["jets"]) == (200, len(answers))
            assert np.abs(counts["p_b"] - histogram).sum() <= 2  # one jet near the edge of a bin


def test_a_job_of_htcondor_asks_for_its_time_and_cores(tmp_path: Path) -> None:
    pytest.importorskip("dask_jobqueue")
    from examples.dask import htcondor

    with htcondor.cluster(3600, str(tmp_path)) as pool:
        job = pool.job_script()
    assert "MaxRuntime = 3600" in job and "RequestCpus = MY.DaskWorkerCores" in job


def test_a_worker_of_slurm_ends_before_its_job_does(tmp_path: Path) -> None:
    """Five minutes before: 90 minutes were asked for."""
    pytest.importorskip("dask_jobqueue")
    from examples.dask import slurm

    with slurm.cluster("short", 90, str(tmp_path)) as nodes:
        job = nodes.job_script()
    assert "#SBATCH -p short" in job and "#SBATCH -t 01:30:00" in job
    assert "--lifetime 85m" in job and "--nthreads 1" in job
