"""Jets of the real NanoAOD file in dask-awkward and in coffea; workers as jobs of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.nanoaod import data, train
from examples.nanoaod.model import INPUTS, build
from pipeline.config import load_config
from pipeline.loading import load
from runtime.session.session import Session
from tests.models import served

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    model = build().eval()
    model.load_state_dict(load_file(train.WEIGHTS))
    signature = load_config(ROOT / "configs" / "nanoaod.yaml").signature()
    return load(served.shared(tmp_path_factory, "flavours", model, signature).path, mode="test")


def expected(file: Path) -> tuple[Any, list[int]]:
    """(jets, 3) of the eager model, and how many jets each event has."""
    columns, _ = data.jets(file)
    model = build().eval()
    model.load_state_dict(load_file(train.WEIGHTS))
    features = np.stack([columns[name].astype(np.float32) for name in INPUTS], axis=1)
    with torch.no_grad():
        answers = model(torch.from_numpy(features)).numpy()
    return answers, np.bincount(columns["entry"], minlength=200).tolist()


def test_dask_awkward_scores_jets_in_their_events(nanoaod_file: Path, session: Session) -> None:
    why = "dask-awkward takes dask < 2025.4: docs/dask.md"
    pytest.importorskip("dask_awkward", minversion="2025.9", reason=why)
    from examples.dask.jets import scored

    lazy = scored(str(nanoaod_file), session, steps=4)
    assert lazy.npartitions == 4 and lazy.fields == ["p_light", "p_c", "p_b"]
    answers, counts = expected(nanoaod_file)
    found = lazy.compute(scheduler="threads")
    assert ak.num(found, axis=1).tolist() == counts
    flat = np.stack([ak.to_numpy(ak.flatten(found[name])) for name in found.fields], axis=1)
    np.testing.assert_allclose(flat, answers, atol=1e-5, rtol=1e-4)


def test_a_coffea_processor_counts_them(nanoaod_file: Path, session: Session) -> None:
    pytest.importorskip("coffea", reason="coffea is not among the test dependencies: docs/dask.md")
    from distributed import Client, LocalCluster

    from examples.dask.processor import run

    answers, counts = expected(nanoaod_file)
    histogram, _ = np.histogram(answers[:, 2], bins=20, range=(0, 1))
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        for where in (None, client):
            found = run([str(nanoaod_file)], session, where, chunk=60)["jets"]
            assert (found["events"], found["jets"]) == (len(counts), len(answers))
            assert np.abs(found["p_b"] - histogram).sum() <= 2  # one beside the edge of a bin


def test_the_job_of_a_batch_system(tmp_path: Path) -> None:
    pytest.importorskip("dask_jobqueue")
    from examples.dask import htcondor, slurm

    with htcondor.cluster(3600, str(tmp_path)) as pool:
        job = pool.job_script()
    assert "MaxRuntime = 3600" in job and "RequestCpus = MY.DaskWorkerCores" in job
    with slurm.cluster("short", 90, str(tmp_path)) as nodes:
        job = nodes.job_script()
    assert "#SBATCH -p short" in job and "#SBATCH -t 01:30:00" in job
    assert "--lifetime 85m" in job and "--nthreads 1" in job
