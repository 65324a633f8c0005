"""Workers as jobs of a batch system: what dask-jobqueue would submit."""

from __future__ import annotations

from pathlib import Path

import pytest


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
